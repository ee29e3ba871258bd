// Keeps the files of the page, all of one build. A page of another build has another name, and replaces this one when
// no page of this one is open any more.

const NAME = "warpool-{version}";
const FILES = "{files}".split(" ");

const store = async () => {
  const cache = await caches.open(NAME);
  await cache.addAll(FILES.map((file) => new Request(file, { cache: "reload" })));
};

const takeOver = async () => {
  const others = (await caches.keys()).filter((name) => name.startsWith("warpool-") && name !== NAME);
  await Promise.all(others.map((name) => caches.delete(name)));
  await clients.claim();
};

const find = async (request) => {
  const cache = await caches.open(NAME);
  return (await cache.match(request, { ignoreSearch: true })) ?? fetch(request);
};

addEventListener("install", (event) => event.waitUntil(store()));
addEventListener("activate", (event) => event.waitUntil(takeOver()));
addEventListener("fetch", (event) => {
  const isOurs = event.request.method === "GET" && event.request.url.startsWith(registration.scope);
  if (isOurs) event.respondWith(find(event.request));
});
