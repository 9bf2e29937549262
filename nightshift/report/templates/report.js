// Sorting, filtering and opening of the experiments. Without it the page still shows everything.
"use strict";
(() => {
  const table = document.querySelector("table.experiments");
  if (!table) return;
  const bodies = [...table.tBodies];
  const keyFilter = document.getElementById("key-filter");
  const verdictButtons = [...document.querySelectorAll("button[data-verdict]")];
  const sortButtons = [...table.querySelectorAll("button[data-sort]")];
  let verdict = "";

  const open = (body, wanted) => {
    const button = body.querySelector("button.open");
    button.setAttribute("aria-expanded", String(wanted));
    body.querySelector("tr.detail").hidden = !wanted;
    body.classList.toggle("opened", wanted);
  };

  const filter = () => {
    let shown = 0;
    for (const body of bodies) {
      const keys = body.dataset.keys.split(" ");
      const fits = (!verdict || body.dataset.verdict === verdict) && (!keyFilter.value || keys.includes(keyFilter.value));
      body.hidden = !fits;
      shown += fits;
    }
    const count = (n) => n.toLocaleString("en-US");
    document.getElementById("shown").textContent = `${count(shown)} of ${count(bodies.length)}`;
    document.getElementById("no-match").hidden = shown > 0;
    for (const button of verdictButtons) button.setAttribute("aria-pressed", String(button.dataset.verdict === verdict));
  };

  const value = (body, name) => {
    if (name === "text") return body.querySelector("td.text").textContent.trim().toLowerCase();
    if (name === "verdict") return body.dataset.verdict;
    return body.dataset[name] === "" ? null : Number(body.dataset[name]);
  };

  const sort = (name, descending) => {
    const sign = descending ? -1 : 1;
    const order = [...bodies].sort((a, b) => {
      const [x, y] = [value(a, name), value(b, name)];
      if (x === null || y === null) return (x === null) - (y === null); // not measured: always last
      const least = typeof x === "string" ? x.localeCompare(y) : x - y;
      return sign * least || a.dataset.number - b.dataset.number;
    });
    table.append(...order);
    for (const button of sortButtons) {
      const head = button.closest("th");
      if (button.dataset.sort === name) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  };

  for (const button of sortButtons) {
    button.addEventListener("click", () => {
      const now = button.closest("th").getAttribute("aria-sort");
      const numbersFirst = ["score", "delta", "better"].includes(button.dataset.sort);
      sort(button.dataset.sort, now ? now === "ascending" : numbersFirst);
    });
  }
  for (const button of verdictButtons) {
    button.addEventListener("click", () => {
      verdict = button.dataset.verdict;
      filter();
    });
  }
  keyFilter.addEventListener("change", filter);

  table.addEventListener("click", (event) => {
    const row = event.target.closest("tr.main");
    if (!row || event.target.closest("a")) return;
    if (!event.target.closest("button") && String(document.getSelection())) return; // selecting text opens nothing
    const body = row.parentElement;
    open(body, body.querySelector("tr.detail").hidden);
  });

  const followLink = () => {
    const row = /^#run-\d+$/.test(location.hash) && document.getElementById(location.hash.slice(1));
    if (!row) return;
    if (row.parentElement.hidden) {
      verdict = "";
      keyFilter.value = "";
      filter();
    }
    open(row.parentElement, true);
    row.scrollIntoView();
  };
  window.addEventListener("hashchange", followLink);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (link && link.getAttribute("href") === location.hash) followLink(); // the same link once more
  });
  followLink();
})();
