// Small helpers, and the one drawing of curves: in an open row, and of two experiments compared.
// All text goes in as text: nothing here reads HTML.
"use strict";

const make = (tag, attributes = {}, ...children) => {
  const drawn = ["svg", "path", "polyline", "circle", "text", "g"].includes(tag);
  const element = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

const named = (number) => String(number).padStart(4, "0");

const readData = () => {
  const block = document.getElementById("compared-data");
  return block ? JSON.parse(block.textContent) : null;
};

// Round values from low to high, at most `most` of them.
const ticks = (low, high, most) => {
  const span = high - low;
  const power = 10 ** Math.floor(Math.log10(span / most));
  const step = [1, 2, 2.5, 5, 10, 20].map((f) => f * power).find((f) => span / f <= most);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i++) found.push(Number((i * step).toPrecision(10)));
  return found;
};

const short = (value) => {
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(1).replace("e+", "e") : String(Number(value.toPrecision(3)));
  return text.replace(/^-/, "\u2212");
};

// `lines`: {kind, steps, values}, one an experiment. Null where none was measured.
const plot = (words, lines) => {
  const series = lines.map(({ kind, steps, values }) => ({
    kind,
    points: steps.map((x, i) => [x, values[i]]).filter(([, y]) => y !== null && y !== undefined),
  })).filter(({ points }) => points.length);
  if (!series.length) return null;
  const all = series.flatMap(({ points }) => points);
  const range = (at) => [Math.min(...all.map((p) => p[at])), Math.max(...all.map((p) => p[at]))];
  const [[left, right], [least, most]] = [range(0), range(1)];
  const pad = (most - least) * 0.06 || Math.abs(most) * 0.1 || 1;
  const [low, high] = [least - pad, most + pad];
  const [width, height, margin, top, bottom] = [320, 150, 42, 8, 126];
  const x = (v) => margin + ((v - left) / (right - left || 1)) * (width - margin - 10);
  const y = (v) => bottom - ((v - low) / (high - low)) * (bottom - top);
  const drawing = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${words} by step` });
  for (const v of ticks(low, high, 4)) {
    drawing.append(make("path", { class: "grid", d: `M${margin} ${y(v)}H${width}` }));
    drawing.append(make("text", { class: "axis", "text-anchor": "end", x: margin - 5, y: y(v) + 4 }, short(v)));
  }
  for (const v of right > left ? ticks(left, right, 5) : [left]) {
    drawing.append(make("text", { class: "axis", "text-anchor": "middle", x: x(v), y: height - 9 }, short(v)));
  }
  for (const { kind, points } of series) {
    const [first] = points;
    drawing.append(points.length > 1
      ? make("polyline", { class: `curve ${kind}`, points: points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") })
      : make("circle", { class: `curve ${kind}`, cx: x(first[0]), cy: y(first[1]), r: 3 }));
  }
  const last = series.map(({ points }) => short(points[points.length - 1][1])).slice(-1)[0];
  const ends = new Set(series.map(({ kind }) => kind)).size > 1 ? [] : [make("b", {}, last)];
  return make("figure", { class: "curve" }, make("figcaption", {}, words, ...ends), drawing);
};

// One drawing for each quantity that was measured in the runs of `shown`: [number, kind] pairs.
const plots = (data, shown) => Object.entries(data.curves).map(([name, words]) => plot(words, shown.flatMap(([number, kind]) =>
  [data.experiments[number]?.curves].filter((run) => run?.values[name])
    .map((run) => ({ kind, steps: run.steps, values: run.values[name] }))))).filter(Boolean);
