// Two experiments beside each other: numbers, settings, curves, and the answers that flipped. Drawn from the page's data.

const startComparison = (data) => {
  const picks = ["a", "b"].map((name) => document.getElementById(`compare-${name}`));
  const place = document.getElementById("compared");
  const numbers = Object.keys(data.experiments).sort((a, b) => a - b);
  if (numbers.length < 2) {
    document.getElementById("compare").hidden = true;
    return;
  }

  const row = (kind, head, ...cells) => make("tr", { class: kind }, make("th", { scope: "row" }, ...head), ...cells.map((cell) => make("td", {}, cell)));

  const numbersAndSettings = (a, b) => {
    const [one, other] = [data.experiments[a], data.experiments[b]];
    const body = make("tbody", {}, ...data.figures.map((what, i) => row("figure", [what], one.figures[i], other.figures[i])));
    if (one.settings && other.settings) {
      const value = (own, key) => own.settings[key] ?? data.settings[key];
      const differing = Object.keys(data.settings).filter((key) => value(one, key) !== value(other, key));
      for (const key of differing) body.append(row("setting", [make("code", {}, key)], value(one, key), value(other, key)));
      if (!differing.length) body.append(row("setting", ["no key differs"], "", ""));
    } else body.append(row("setting", ["settings: a train.toml cannot be read"], "", ""));
    const heads = [make("th"), ...[["A", a, "a"], ["B", b, "b"]].map(([name, number, kind]) =>
      make("th", { scope: "col" }, make("span", { class: `swatch ${kind}` }), `${name} `, make("a", { href: `#run-${named(number)}`, class: "run" }, named(number))))];
    return make("table", { class: "pair" }, make("thead", {}, make("tr", {}, ...heads)), body);
  };

  const answer = (name, own, index) => {
    const found = data.texts[own.answers[index]];
    return [make("p", { class: "small label-line" }, `Answer of ${name}`), make("pre", {}, found === "" ? "(empty)" : found)];
  };

  const card = (one, other, index, kind) => make("figure", { class: `rollout ${kind}` },
    make("figcaption", {}, make("b", {}, kind)),
    make("p", { class: "small label-line" }, "Problem"), make("pre", {}, data.examples[index][0]),
    ...answer("A", one, index), ...answer("B", other, index));

  const flips = (a, b) => {
    const [one, other] = [data.experiments[a], data.experiments[b]];
    if (!one.scores || !other.scores || one.set !== other.set || one.scores.length !== other.scores.length) {
      return [make("p", { class: "quiet" }, "Flips of answers: not measured on the same examples.")];
    }
    const found = { fixed: [], broken: [] };
    for (let i = 0; i < one.scores.length; i++) {
      if (one.scores[i] !== other.scores[i]) found[other.scores[i] > one.scores[i] ? "fixed" : "broken"].push(i);
    }
    const [fixed, broken] = [found.fixed.length, found.broken.length];
    const half = 1.96 * Math.sqrt(fixed + broken);
    const net = `${fixed < broken ? "\u2212" : fixed > broken ? "+" : ""}${Math.abs(fixed - broken)}`;
    const isTold = (i) => data.examples[i] && one.answers[i] !== undefined && other.answers[i] !== undefined;
    const cards = ["fixed", "broken"].flatMap((kind) => found[kind].filter(isTold).slice(0, 3).map((i) => card(one, other, i, kind)));
    const told = fixed + broken === 0 ? "" : cards.length
      ? " Below the first three of each of which this page holds the texts."
      : " Their texts are not in this page.";
    return [
      make("p", { class: "flips" }, `B against A, of ${one.scores.length.toLocaleString("en-US")} examples: `,
        make("b", { class: "good" }, `${fixed} fixed`), ", ", make("b", { class: "bad" }, `${broken} broken`), `, net ${net} ± ${half.toFixed(0)}.${told}`),
      make("div", { class: "rollouts" }, ...cards),
    ];
  };

  const show = () => {
    const [a, b] = picks.map((pick) => pick.value);
    const drawn = plots(data, [[a, "a"], [b, "b"]]);
    const legend = make("p", { class: "legend" }, ...[["a", a], ["b", b]].map(([kind, number]) =>
      make("span", {}, make("span", { class: `swatch ${kind}` }), `${named(number)} ${data.experiments[number].figures[0]}`)),
    make("span", { class: "quiet" }, "a line a run, by step"));
    place.replaceChildren(numbersAndSettings(a, b),
      ...(drawn.length ? [legend, make("div", { class: "curves" }, ...drawn)] : [make("p", { class: "quiet" }, "Curves: not measured.")]),
      ...flips(a, b));
  };

  for (const pick of picks) {
    pick.replaceChildren(...numbers.map((number) =>
      make("option", { value: number }, `${named(number)} ${data.experiments[number].figures[0]}: ${data.experiments[number].title}`)));
    pick.addEventListener("change", show);
  }
  const kept = [...document.querySelectorAll("#kept .chain a.run")].map((link) => String(Number(link.textContent)));
  const first = kept.find((number) => numbers.includes(number)) ?? numbers[0];
  const last = kept.reverse().find((number) => numbers.includes(number) && number !== first) ?? numbers.findLast((number) => number !== first);
  picks[0].value = first;
  picks[1].value = last;
  show();
};
