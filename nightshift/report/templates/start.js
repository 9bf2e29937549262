// Starts the page.

const data = readData();
const parts = document.querySelector("table.experiments") ? startTable(data) : null;
if (parts && data) startComparison(data);

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
parts?.followLink();
