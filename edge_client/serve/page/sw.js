// Keeps the page's own files, so that it opens without any network. Answers never pass through here.
const CACHE = "moa-page-1";
const FILES = ["./", "style.css", "app.js", "answer.js", "chat.js", "figure.js", "figures.js", "highlight.js", "markdown.js", "render.js", "script.js",
  "store.js", "stream.js", "temml.css", "temml.min.js", "theme.css", "manifest.webmanifest", "icon.svg"];

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(FILES)).then(() => self.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  const old = async () => (await caches.keys()).filter((name) => name !== CACHE).map((name) => caches.delete(name));
  event.waitUntil(old().then((all) => Promise.all(all)).then(() => self.clients.claim()));
});

// The endpoint's copy first, as it may be newer; ours when there is none.
async function fresh(request) {
  const cache = await caches.open(CACHE);
  try {
    const response = await fetch(request);
    if (response.ok) await cache.put(request, response.clone());
    return response;
  } catch (error) {
    const kept = await cache.match(request);
    if (kept) return kept;
    throw error;
  }
}

self.addEventListener("fetch", (event) => {
  const url = new URL(event.request.url);
  const mine = FILES.some((file) => new URL(file, self.registration.scope).pathname === url.pathname);
  if (event.request.method === "GET" && url.origin === self.location.origin && mine) event.respondWith(fresh(event.request));
});
