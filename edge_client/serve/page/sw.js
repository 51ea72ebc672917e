// Keeps the page's own files, so that it opens without any network. Answers never pass through
// here.
const MINE = "moa-page-"; // other pages of this origin have caches, too: only our own are touched
const CACHE = `${MINE}2 ${self.registration.scope}`;
const FILES = [
  "./",
  "style.css",
  "app.js",
  "answer.js",
  "attachments.js",
  "chat.js",
  "events.js",
  "figure.js",
  "figures.js",
  "highlight.js",
  "markdown.js",
  "render.js",
  "script.js",
  "signs.js",
  "store.js",
  "stream.js",
  "structure.js",
  "temml.css",
  "temml.min.js",
  "theme.css",
  "manifest.webmanifest",
  "icon.svg",
];

self.addEventListener("install", (event) => {
  event.waitUntil(
    caches
      .open(CACHE)
      .then((cache) => cache.addAll(FILES))
      .then(() => self.skipWaiting()),
  );
});

// Those of older versions, which had no scope in their names, hold this page.
async function isOld(name) {
  if (!name.startsWith(MINE) || name === CACHE) return false;
  if (name.includes(" ")) return name.endsWith(` ${self.registration.scope}`);
  return Boolean(await (await caches.open(name)).match(self.registration.scope));
}

self.addEventListener("activate", (event) => {
  const clean = async () => {
    for (const name of await caches.keys()) if (await isOld(name)) await caches.delete(name);
  };
  event.waitUntil(clean().then(() => self.clients.claim()));
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
  const mine = FILES.some(
    (file) => new URL(file, self.registration.scope).pathname === url.pathname,
  );
  if (event.request.method === "GET" && url.origin === self.location.origin && mine) {
    event.respondWith(fresh(event.request));
  }
});
