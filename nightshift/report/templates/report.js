// Draws the charts and fills the table; the runs that the user chooses are marked in all of them. Foreign text is only
// set as text: nothing here parses HTML.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const { rows, specs } = data;
const columns = Object.entries(data.columns);
const byNumber = new Map(rows.map((row) => [row.number, row]));
const HUES = ["#2f6fde", "#e07b1f", "#9b51c9", "#1f9e89", "#d6336c", "#8a6d1d"];
const views = {};

const at = (id) => document.getElementById(id);
const named = (number) => String(number).padStart(4, "0");
const el = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const change = ([key, old, value]) => el("code", { className: "change" },
  ...(old || value ? [`${key} `, el("s", {}, old), ` → ${value}`] : [key]));

// The chosen runs: at first the baseline and the last keeps, as many as there are colours.
const chosen = [...data.first.slice(0, 1), ...data.first.slice(1).slice(1 - HUES.length)];
const hue = (number) => HUES[chosen.indexOf(number)] ?? "transparent";
const choose = (number) => {
  if (chosen.includes(number)) chosen.splice(chosen.indexOf(number), 1);
  else if (chosen.push(number) > HUES.length) chosen.shift();
  showChosen();
};
const isCurve = (id) => id.startsWith("curve-");
const points = (name) => chosen.flatMap((number) => {
  const { step: steps = [], [name]: values = [] } = byNumber.get(number).curves ?? {};
  const run = steps.map((step, i) => ({ experiment: named(number), hue: hue(number), step, [name]: values[i] ?? null }));
  return run.filter((point) => point[name] !== null);
});
const showChosen = () => {
  at("chips").replaceChildren(...chosen.map((number) => {
    const dot = el("i");
    dot.style.background = hue(number);
    const words = `${named(number)} ${byNumber.get(number).status} ×`;
    return el("button", { type: "button", title: "remove", onclick: () => choose(number) }, dot, words);
  }));
  views.progress?.signal("hues", HUES).signal("chosen", [...chosen]).runAsync();
  for (const [number, line] of lines) mark(number, line);
  return Promise.all(Object.keys(specs).filter(isCurve).map((id) => draw(id, specs[id]))); // anew: other data, other axes
};

// What hovering over a dot shows.
const tips = (dot) => {
  const row = byNumber.get(dot.n);
  return {
    ...dot,
    experiment: `${named(row.number)} ${row.status}`,
    hypothesis: row.title,
    change: row.changes.map(([key, old, value]) => (old || value ? `${key} ${old} → ${value}` : key)).join("\n"),
    score: row.cells.eval_score,
    effect: `${row.cells.effect_at_decision} pp`,
  };
};
const draw = async (id, spec) => {
  if (spec.datasets?.dots) spec.datasets.dots = spec.datasets.dots.map(tips);
  if (innerWidth < 600 && spec.datasets?.ends) spec.datasets.ends = []; // no room beside the lines
  if (isCurve(id)) spec.datasets = { runs: points(id.replace("curve-", "")) };
  const { view } = await vegaEmbed(at(id), spec, { ast: true, actions: false, renderer: "svg", logLevel: 1 });
  views[id]?.finalize();
  views[id] = view;
  view.addEventListener("click", (_, item) => {
    if (byNumber.has(item?.datum?.n) && item.mark.marktype === "symbol") choose(item.datum.n);
  });
};

// The table. A line is made when it is first shown.
const lines = new Map();
const texts = new Map(rows.map((row) => [row.number, [
  named(row.number), row.status, row.failure, row.note, ...row.changes.flat(), ...row.details.map(([, text]) => text),
].join(" ").toLowerCase()]));
const mark = (number, line) => {
  line.classList.toggle("is-chosen", chosen.includes(number));
  line.style.setProperty("--hue", hue(number));
};
const detailsOf = (row) => {
  const list = el("dl", { className: "details" });
  for (const [label, text] of row.details) list.append(el("dt", {}, label), el("dd", {}, text));
  return list;
};
const toggle = (row, line, wanted) => {
  const isOpen = line.nextSibling?.className === "open";
  if (isOpen === (wanted ?? !isOpen)) return;
  line.querySelector("button").ariaExpanded = String(!isOpen);
  if (isOpen) line.nextSibling.remove();
  else line.after(el("tr", { className: "open" }, el("td", { colSpan: 3 + columns.length }, detailsOf(row))));
  if (isOpen === chosen.includes(row.number)) choose(row.number);
};
const lineOf = (row) => {
  if (lines.has(row.number)) return lines.get(row.number);
  const line = el("tr", { id: `run-${named(row.number)}`, className: "run" });
  line.append(
    el("td", {}, el("button", { type: "button", ariaExpanded: "false" }, named(row.number))),
    el("td", {}, el("span", { className: `kind ${row.kind}` }, row.verdict),
      el("small", {}, row.status.slice(row.verdict.length) || (row.verdict === "crash" ? ` ${row.failure}` : ""))),
    el("td", {}, el("div", {}, row.title || "no description"), ...row.changes.slice(0, 4).flatMap((each) => [change(each), " "]),
      el("small", {}, [row.changes.length > 4 && `and ${row.changes.length - 4} more keys`, row.note].filter(Boolean).join("; "))),
    ...columns.map(([name]) => el("td", {}, row.cells[name])));
  line.onclick = () => { if (!String(document.getSelection())) toggle(row, line); }; // selecting text opens nothing
  lines.set(row.number, line);
  mark(row.number, line);
  return line;
};
const body = at("table").tBodies[0];
const state = { verdict: "", order: [...rows], most: 200 };
const filter = () => {
  const words = at("search").value.toLowerCase().split(/\s+/);
  const fit = state.order.filter((row) => (!state.verdict || row.verdict === state.verdict)
    && words.every((word) => texts.get(row.number).includes(word)));
  const open = new Map([...body.querySelectorAll("tr.open")].map((line) => [line.previousSibling, line]));
  body.replaceChildren(...fit.slice(0, state.most).map(lineOf).flatMap((line) => (open.has(line) ? [line, open.get(line)] : [line])));
  at("more").hidden = fit.length <= state.most;
  at("more").textContent = `Show all ${fit.length}`;
  at("shown").textContent = `${fit.length} of ${rows.length}`;
  for (const button of document.querySelectorAll("[data-verdict]")) {
    button.ariaPressed = String(button.dataset.verdict === state.verdict);
  }
};
for (const button of document.querySelectorAll("[data-verdict]")) {
  button.onclick = () => { state.verdict = button.dataset.verdict; filter(); };
}
at("search").oninput = filter;
at("more").onclick = () => { state.most = Infinity; filter(); };
const heads = [...document.querySelectorAll("[data-sort]")];
for (const head of heads) {
  head.onclick = () => {
    const name = head.dataset.sort;
    const sign = head.parentElement.ariaSort === "descending" ? 1 : -1;
    for (const other of heads) other.parentElement.ariaSort = other === head ? (sign > 0 ? "ascending" : "descending") : null;
    state.order.sort((a, b) => { // what was not measured is last, either way
      const [x, y] = [a[name], b[name]];
      return (x === null) - (y === null) || (x === y ? a.number - b.number : (x > y ? sign : -sign));
    });
    filter();
  };
}
const follow = () => {
  const row = byNumber.get(Number(/^#run-(\d+)$/.exec(location.hash)?.[1]));
  if (!row) return;
  state.verdict = at("search").value = "";
  state.most = Math.max(state.most, state.order.indexOf(row) + 1);
  filter();
  toggle(row, lineOf(row), true);
  lineOf(row).scrollIntoView();
};
addEventListener("hashchange", follow);
document.addEventListener("click", (event) => {
  if (event.target.closest("a")?.getAttribute("href") === location.hash) follow(); // the same link once more
});

// Two runs compared: figures and settings.
const picks = ["a", "b"].map((name) => at(`compare-${name}`));
const pairs = rows.filter((row) => row.settings);
const compare = () => {
  const [a, b] = picks.map((pick) => byNumber.get(Number(pick.value)));
  const line = (name, x, y) => el("tr", {}, el("td", {}, name), el("td", {}, x), el("td", {}, y));
  const value = (row, key) => row.settings[key] ?? "unset";
  const keys = [...new Set([...Object.keys(a.settings), ...Object.keys(b.settings)])].filter((key) => value(a, key) !== value(b, key));
  at("compared").replaceChildren(el("table", {}, el("tbody", {},
    line("", `A ${named(a.number)}`, `B ${named(b.number)}`), line("verdict", a.status, b.status),
    ...columns.map(([name, head]) => line(head, a.cells[name], b.cells[name])),
    ...(keys.length ? keys.map((key) => line(key, value(a, key), value(b, key))) : [line("no key differs", "", "")]))));
};
if (pairs.length > 1) {
  for (const pick of picks) {
    pick.append(...pairs.map((row) => el("option", { value: row.number }, `${named(row.number)} ${row.status}: ${row.title}`.slice(0, 90))));
    pick.onchange = compare;
  }
  const kept = data.first.filter((number) => pairs.includes(byNumber.get(number)));
  picks[0].value = kept[0] ?? pairs[0].number;
  picks[1].value = kept.length > 1 ? kept.at(-1) : pairs.findLast((row) => row.number !== Number(picks[0].value)).number;
  compare();
} else at("compare").hidden = true;

filter();
Promise.all(Object.entries(specs).filter(([id, spec]) => spec && !isCurve(id)).map(([id, spec]) => draw(id, spec)))
  .then(showChosen).then(() => {
    follow();
    document.documentElement.dataset.drawn = "yes";
  });
