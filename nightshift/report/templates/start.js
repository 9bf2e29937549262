// Starts the page, and keeps it up to date where a server stands behind it.

const state = { group: "", key: "", search: "", sort: ["number", false], columns: null, opened: new Set(), a: null, b: null };
let parts = null;

const start = () => {
  parts = null;
  const data = readData();
  if (!document.querySelector("table.experiments")) return;
  parts = startTable(state, data);
  if (data) startComparison(state, data);
};

// What is read: the open row in the window, or what stands at its top. It is put there again, whatever grew above it.
const anchor = () => {
  const found = [...document.querySelectorAll("main section, tr.main")]
    .map((one) => ({ id: one.id, isOpen: one.parentElement.classList.contains("opened"), top: one.getBoundingClientRect().top, isShown: one.getClientRects().length > 0 }))
    .filter((one) => one.isShown && one.top >= 0).sort((one, other) => one.top - other.top);
  return scrollY > 0 ? found.find((one) => one.isOpen && one.top < innerHeight) ?? found[0] : null;
};

const renew = (html) => {
  const next = new DOMParser().parseFromString(html, "text/html");
  const script = (page) => page.querySelector("body > script")?.textContent;
  if (!next.querySelector("main") || script(next) !== script(document)) {
    location.reload(); // another version of Nightshift wrote it
    return;
  }
  const held = anchor();
  const [y, focused] = [scrollY, document.activeElement];
  const selection = focused?.type === "search" ? [focused.selectionStart, focused.selectionEnd] : null;
  const folds = new Map([...document.querySelectorAll("details[id]")].map((fold) => [fold.id, fold.open]));
  document.title = next.title;
  document.querySelector("main").replaceWith(document.adoptNode(next.querySelector("main")));
  version = next.querySelector("meta[name=nightshift-version]").content;
  for (const fold of document.querySelectorAll("details[id]")) fold.open = folds.get(fold.id) ?? fold.open;
  start();
  const again = focused?.id ? document.getElementById(focused.id) : null;
  again?.focus({ preventScroll: true });
  if (selection) again?.setSelectionRange(...selection);
  const place = held && document.getElementById(held.id);
  const top = place ? scrollY + place.getBoundingClientRect().top - held.top : y;
  scrollTo({ top, behavior: "instant" });
};

let version = document.querySelector("meta[name=nightshift-version]")?.content;
const say = (text) => {
  document.getElementById("live").textContent = text;
};

const ask = async (address) => {
  try {
    const answer = await fetch(`${address}${location.search}`, { cache: "no-store" });
    return answer.ok ? await answer.text() : null;
  } catch {
    return null; // nobody listens there any more
  }
};

const look = async () => {
  const now = await ask("version");
  const html = now !== null && now !== version ? await ask("./") : null;
  if (html !== null) renew(html);
  say(now === null ? "its server does not answer: the page as it was" : "live");
  setTimeout(look, 2000);
};

document.addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (link && link.getAttribute("href") === location.hash) parts?.followLink(); // the same link once more
});
window.addEventListener("hashchange", () => parts?.followLink());
window.addEventListener("resize", () => parts?.showColumns());
let folded = [];
window.addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details.fold:not([open])")];
  for (const fold of folded) fold.open = true;
});
window.addEventListener("afterprint", () => {
  for (const fold of folded) fold.open = false;
});
start();
parts?.followLink();
if (version) setTimeout(look, 2000);
