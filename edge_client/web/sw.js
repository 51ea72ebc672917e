// Keeps the whole app, drafter included: a second visit loads nothing. Stands in the app after a
// line that each build writes anew: VERSION, FILES (address: kind of contents) and POLICY, so that
// a browser notices a new build.

const MINE = "moa-app-"; // other pages of this origin have caches, too: only our own are touched
const CACHE = `${VERSION} ${self.registration.scope}`;
const KEPT = /^packed\//; // named by their contents: those of an older build are as good

async function install() {
  const cache = await caches.open(CACHE);
  const older = await Promise.all((await own()).map((name) => caches.open(name)));
  await Promise.all(
    Object.keys(FILES).map(async (file) => {
      for (const one of KEPT.test(file) ? older : []) {
        const old = await one.match(file);
        if (old) return cache.put(file, old);
      }
      return get(cache, file);
    }),
  );
  await self.skipWaiting();
}

async function get(cache, file) {
  const response = await fetch(file, { cache: "no-cache" });
  if (!response.ok) throw new Error(`${file}: ${response.status}`);
  // The policy comes with each file: a static host sends none, and a worker does not inherit the
  // page's.
  const kept = new Response(response.body, {
    headers: { "Content-Type": FILES[file], "Content-Security-Policy": POLICY },
  });
  await cache.put(file, kept.clone());
  return kept;
}

// The caches of this app. Those of older versions, which had no scope in their names, hold its
// page.
async function own() {
  const found = [];
  for (const name of await caches.keys()) {
    if (!name.startsWith(MINE)) continue;
    const here = name.includes(" ")
      ? name.endsWith(` ${self.registration.scope}`)
      : await (await caches.open(name)).match(self.registration.scope);
    if (here) found.push(name);
  }
  return found;
}

async function activate() {
  for (const name of await own()) if (name !== CACHE) await caches.delete(name);
  await self.clients.claim();
}

self.addEventListener("install", (event) => event.waitUntil(install()));
self.addEventListener("activate", (event) => event.waitUntil(activate()));

self.addEventListener("fetch", (event) => {
  const { request } = event;
  const url = new URL(request.url);
  const file =
    url.href
      .slice(self.registration.scope.length)
      .split(/[?#]/)[0]
      .replace(/^index\.html$/, "") || "./";
  if (
    request.method !== "GET" ||
    !url.href.startsWith(self.registration.scope) ||
    !Object.hasOwn(FILES, file)
  ) {
    return;
  }
  event.respondWith(
    caches.open(CACHE).then(async (cache) => (await cache.match(file)) ?? get(cache, file)),
  );
});
