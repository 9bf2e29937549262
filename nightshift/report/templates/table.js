// The table of experiments: sorted, filtered, searched, opened, its columns chosen, and as CSV.
// Without it the page still shows everything.

const csv = (rows) => {
  // A spreadsheet takes a text that begins so for a formula. Numbers are our own.
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    const isFormula = typeof value === "string" && /^[\s\u00a0]*[=+\-@\t\r\n\u2212\uff1d\uff0b\uff0d\uff20]/.test(text);
    return `"${(isFormula ? "'" : "") + text.replaceAll('"', '""')}"`;
  };
  return "\ufeff" + rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
};

const startTable = (data) => {
  const state = { group: "", key: "", search: "", columns: null };
  const table = document.querySelector("table.experiments");
  const bodies = [...table.tBodies];
  const keyFilter = document.getElementById("key-filter");
  const search = document.getElementById("search");
  const groupButtons = [...document.querySelectorAll("button[data-group]")];
  const sortButtons = [...table.querySelectorAll("button[data-sort]")];
  const columnBoxes = [...document.querySelectorAll("input[data-column]")];
  const texts = new WeakMap();

  const open = (body, wanted) => {
    body.querySelector("button.open").setAttribute("aria-expanded", String(wanted));
    body.querySelector("tr.detail").hidden = !wanted;
    body.classList.toggle("opened", wanted);
    const curves = body.querySelector("div.curves");
    if (wanted && curves && data && !curves.querySelector("svg")) curves.append(...plots(data, [[body.dataset.number, "a"]]));
  };

  const searched = (body) => {
    if (!texts.has(body)) {
      const parts = ["button.open", "td.c-text", ".changes", ".told dd"].map((name) => body.querySelector(name)?.textContent ?? "");
      texts.set(body, parts.join(" ").toLowerCase());
    }
    return texts.get(body);
  };

  const filter = () => {
    let shown = 0;
    const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    for (const body of bodies) {
      const fits = (!state.group || body.dataset.group === state.group)
        && (!state.key || body.dataset.keys.split(" ").includes(state.key))
        && words.every((word) => searched(body).includes(word));
      body.hidden = !fits;
      shown += fits;
    }
    const count = (n) => n.toLocaleString("en-US");
    document.getElementById("shown").textContent = `${count(shown)} of ${count(bodies.length)}`;
    document.getElementById("no-match").hidden = shown > 0;
    for (const button of groupButtons) button.setAttribute("aria-pressed", String(button.dataset.group === state.group));
    keyFilter.value = state.key;
    search.value = state.search;
  };

  const number = (text) => (text === "" || text === undefined ? null : Number(text));
  const value = (body, name) => {
    if (name === "text") return body.querySelector("td.c-text").textContent.trim().toLowerCase();
    if (name === "verdict") return body.dataset.group;
    if (name === "keys") return body.dataset.keys || null;
    return number(body.dataset[name]);
  };

  const sort = (name, descending) => {
    const sign = descending ? -1 : 1;
    const known = new Map(bodies.map((body) => [body, value(body, name)]));
    bodies.sort((a, b) => {
      const [x, y] = [known.get(a), known.get(b)];
      const none = (x === null) - (y === null); // not measured: always last
      const least = x === null || y === null ? 0 : typeof x === "string" ? x.localeCompare(y) : x - y;
      return none || sign * least || a.dataset.number - b.dataset.number;
    });
    table.append(...bodies);
    for (const button of sortButtons) {
      const head = button.closest("th");
      if (button.dataset.sort === name) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  };

  const column = (name) => table.querySelector(`th.c-${name}`);
  const showColumns = () => {
    if (state.columns) {
      table.classList.add("chosen");
      for (const box of columnBoxes) table.classList.toggle(`off-${box.dataset.column}`, !state.columns.has(box.dataset.column));
    }
    for (const box of columnBoxes) box.checked = getComputedStyle(column(box.dataset.column)).display !== "none";
  };

  const rows = () => {
    const heads = ["run", "verdict", "now", "hypothesis", "changes", "score", "strict score", "effect_at_decision, pp", "± pp",
      "P(it helps)", "seconds"];
    const points = (text) => (number(text) === null ? null : Number((100 * number(text)).toPrecision(6)));
    return [heads, ...bodies.filter((body) => !body.hidden).map((body) => {
      const { dataset } = body;
      const changes = body.querySelector(".changes");
      return [
        Number(dataset.number), dataset.group, dataset.now,
        body.querySelector(".told dd").textContent,
        changes ? [...changes.children].map((line) => line.textContent).join("; ") : "",
        number(dataset.score), number(dataset.strict), points(dataset.effect), points(dataset.effectHalf),
        number(dataset.helps), number(dataset.seconds),
      ];
    })];
  };

  const followLink = () => {
    const row = /^#run-\d+$/.test(location.hash) && document.getElementById(location.hash.slice(1));
    if (!row) return;
    const body = row.parentElement;
    if (body.hidden) {
      Object.assign(state, { group: "", key: "", search: "" });
      filter();
    }
    document.getElementById("fold-experiments").open = true;
    open(body, true);
    row.scrollIntoView();
  };

  for (const button of sortButtons) {
    button.addEventListener("click", () => {
      const now = button.closest("th").getAttribute("aria-sort");
      const largestFirst = ["score", "strict", "effect", "helps"].includes(button.dataset.sort);
      sort(button.dataset.sort, now ? now === "ascending" : largestFirst);
    });
  }
  for (const button of groupButtons) {
    button.addEventListener("click", () => {
      state.group = button.dataset.group;
      filter();
    });
  }
  keyFilter.addEventListener("change", () => {
    state.key = keyFilter.value;
    filter();
  });
  search.addEventListener("input", () => {
    state.search = search.value;
    filter();
  });
  for (const box of columnBoxes) {
    box.addEventListener("change", () => {
      state.columns = new Set(columnBoxes.filter((one) => one.checked).map((one) => one.dataset.column));
      showColumns();
    });
  }
  document.getElementById("download").addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([csv(rows())], { type: "text/csv;charset=utf-8" }));
    make("a", { href: url, download: "experiments.csv" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  });
  table.addEventListener("click", (event) => {
    const row = event.target.closest("tr.main");
    if (!row || event.target.closest("a")) return;
    if (!event.target.closest("button") && String(document.getSelection())) return; // selecting text opens nothing
    const body = row.parentElement;
    open(body, body.querySelector("tr.detail").hidden);
  });

  filter();
  showColumns();
  return { followLink, showColumns };
};
