// Keeps the whole app, drafter included: a second visit loads nothing. Stands in the app after a line that each build
// writes anew: VERSION, FILES (address: kind of contents) and POLICY, so that a browser notices a new build.

const KEPT = /^packed\//;  // named by their contents: those of an older build are as good

async function install() {
  const cache = await caches.open(VERSION);
  await Promise.all(Object.keys(FILES).map(async (file) => {
    if (KEPT.test(file)) {
      const old = await caches.match(file);
      if (old) return cache.put(file, old);
    }
    return get(cache, file);
  }));
  await self.skipWaiting();
}

async function get(cache, file) {
  const response = await fetch(file, { cache: "no-cache" });
  if (!response.ok) throw new Error(`${file}: ${response.status}`);
  // The policy comes with each file: a static host sends none, and a worker does not inherit the page's.
  const kept = new Response(response.body, { headers: { "Content-Type": FILES[file], "Content-Security-Policy": POLICY } });
  await cache.put(file, kept.clone());
  return kept;
}

async function activate() {
  for (const name of await caches.keys()) if (name !== VERSION) await caches.delete(name);
  await self.clients.claim();
}

self.addEventListener("install", (event) => event.waitUntil(install()));
self.addEventListener("activate", (event) => event.waitUntil(activate()));

self.addEventListener("fetch", (event) => {
  const { request } = event, url = new URL(request.url);
  const file = url.href.slice(self.registration.scope.length).split(/[?#]/)[0].replace(/^index\.html$/, "") || "./";
  if (request.method !== "GET" || !url.href.startsWith(self.registration.scope) || !Object.hasOwn(FILES, file)) return;
  event.respondWith(caches.open(VERSION).then(async (cache) => await cache.match(file) ?? get(cache, file)));
});
