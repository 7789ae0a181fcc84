// What all sections share: elements, units, colours, canvases, tables.

const data = JSON.parse(document.getElementById("data").textContent);

// Okabe and Ito's palette for all kinds of colour vision (jfly.uni-koeln.de/color, 2008), black
// left out. From the ninth device on it repeats under patterns; every mark also has a number.
const PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"];

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null)); // strings become text, never markup
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// ---- units ----

function digits(value) {
  const size = Math.abs(value);
  const places = size >= 100 || value === 0 ? 0 : size >= 10 ? 1 : 2;
  return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
}

function scaled(value, units) {
  const [unit, scale] = units.find(([, least]) => Math.abs(value) >= least * 0.9995) ?? units.at(-1);
  return `${digits(value / scale)}\u00a0${unit}`;
}

const TIMES = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
const time = (seconds) => (seconds == null ? "–" : seconds === 0 ? "0 s" : scaled(seconds, TIMES));
const nanoseconds = (ns) => time(ns / 1e9);
const BYTES = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
const bytes = (size) => (size < 999.5 ? `${Math.round(size)}\u00a0B` : scaled(size, BYTES));
const FLOPS = [["TFLOP", 1e12], ["GFLOP", 1e9], ["MFLOP", 1e6], ["kFLOP", 1e3]];
const flops = (work) => (work < 999.5 ? `${Math.round(work)}\u00a0FLOP` : scaled(work, FLOPS));
const count = (value) => value.toLocaleString("en");
const percent = (ratio) => (ratio === 0 ? "0\u00a0%" : ratio > 0 && ratio < 0.0005 ? "below\u00a00.1\u00a0%" : `${(100 * ratio).toFixed(Math.abs(ratio) < 0.0995 ? 1 : 0)}\u00a0%`);
const share = (part, whole) => (whole > 0 ? percent(part / whole) : "–");
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

// Round numbers on an axis from 0, or from `low`, to `high`.
function ticks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) ?? 10);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high * (1 + 1e-9); at += step) found.push(at);
  return found;
}

// An axis says its unit once for all its ticks.
function inUnit(largest, units) {
  const [unit, scale] = units.find(([, least]) => largest >= least) ?? units.at(-1);
  return { unit, tell: (value) => (value / scale).toLocaleString("en", { maximumFractionDigits: 6 }) };
}

// ---- colours ----

const colourOf = (device) => PALETTE[device % PALETTE.length];
const patternOf = (device) => Math.floor(device / PALETTE.length) % 4;

function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.22 ? "#10151c" : "#ffffff";
}

function theme() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return { paper: of("paper"), surface: of("surface"), ink: of("ink"), soft: of("soft"), line: of("line"), accent: of("accent") };
}

function tile(draw, size = 8) {
  const canvas = el("canvas", { width: size, height: size });
  draw(canvas.getContext("2d"), size);
  return canvas;
}

// Strokes that tell devices, or reasons, apart without colour.
const STROKES = {
  diagonal: [[-2, 10, 10, -2], [-2, 2, 2, -2], [6, 10, 10, 6]],
  level: [[0, 4, 8, 4]],
  upright: [[4, 0, 4, 8]],
  cross: [[0, 0, 8, 8], [0, 8, 8, 0]],
  dots: [[1.5, 2, 2.5, 2], [5.5, 6, 6.5, 6]],
};

const tiles = new Map();

function pattern(context, name, colour) {
  const key = `${name} ${colour}`;
  if (!tiles.has(key)) tiles.set(key, context.createPattern(strokes(name, colour), "repeat"));
  return tiles.get(key);
}

function strokes(name, colour) {
  return tile((on) => {
    on.strokeStyle = colour;
    on.lineWidth = 1;
    for (const [x, y, u, v] of STROKES[name]) {
      on.beginPath();
      on.moveTo(x, y);
      on.lineTo(u, v);
      on.stroke();
    }
  });
}

function fillDevice(context, device, x, y, width, height) {
  context.fillStyle = colourOf(device);
  context.fillRect(x, y, width, height);
  if (patternOf(device)) {
    context.fillStyle = pattern(context, ["", "diagonal", "dots", "cross"][patternOf(device)], inkOn(colourOf(device)));
    context.fillRect(x, y, width, height);
  }
}

// A label on the colour of a device; under a pattern it has an outline, so that it can be read.
function labelDevice(context, device, label, x, y) {
  if (patternOf(device)) {
    context.strokeStyle = colourOf(device);
    context.lineWidth = 4;
    context.lineJoin = "round";
    context.strokeText(label, x, y);
  }
  context.fillStyle = inkOn(colourOf(device));
  context.fillText(label, x, y);
}

function badge(device) {
  const colour = colourOf(device);
  return el("span", { class: `badge p${patternOf(device)}`, style: `--own:${colour};color:${inkOn(colour)}`, "aria-hidden": "true" }, String(device));
}

const deviceName = (device) => data.devices[device].name;
const deviceLabel = (device) => el("span", { class: "device" }, badge(device), deviceName(device));
const legend = (...items) => el("ul", { class: "legend" }, ...items.map((item) => el("li", {}, item)));
const devicesLegend = () => legend(...data.devices.map((_, d) => deviceLabel(d)));

// ---- canvases ----

// A canvas as wide as its host, sharp on every screen, drawn anew when size or theme change.
function surface(host, height, label, draw) {
  const canvas = el("canvas", { tabindex: "0", role: "application", "aria-label": label });
  host.append(canvas);
  const view = { canvas, width: 0, height, context: canvas.getContext("2d"), redraw };
  let waiting = false;
  function paint() {
    waiting = false;
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${view.height}px`;
    view.width = host.clientWidth;
    if (!view.width) return;
    canvas.width = Math.round(view.width * ratio);
    canvas.height = Math.round(view.height * ratio);
    view.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    view.context.clearRect(0, 0, view.width, view.height);
    draw(view, theme());
  }
  function redraw() {
    if (!waiting) requestAnimationFrame(paint);
    waiting = true;
  }
  watch(host, redraw);
  return view;
}

// Calls now and whenever the width of an element or the theme changes.
function watch(host, draw) {
  let width = -1;
  new ResizeObserver(() => {
    if (host.clientWidth !== width) draw();
    width = host.clientWidth;
  }).observe(host);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

// As much of a text as fits: without the modules in front first, its end kept in any case.
function fitted(context, text, width) {
  const fits = (part) => context.measureText(part).width <= width;
  if (fits(text)) return text;
  const [path, kind] = text.includes(" · ") ? text.split(" · ") : [text, ""];
  const parts = path.split(".");
  for (let from = 1; from < parts.length; from++) {
    const rest = `…${parts.slice(from).join(".")}${kind && ` · ${kind}`}`;
    if (fits(rest) && rest.length > 3) return rest;
  }
  if (kind) return fitted(context, kind, width);
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (fits(`…${text.slice(text.length - middle)}`)) low = middle;
    else high = middle - 1;
  }
  return low ? `…${text.slice(text.length - low)}` : "";
}

// A name of an op or module that may be broken between its parts.
function breakable(name) {
  const parts = name.split(/(?<=[.:/@_])/);
  return el("span", {}, ...parts.flatMap((part, k) => (k ? [el("wbr"), part] : [part])));
}

// ---- tables ----

// Columns are [title, cell of row, is a number]; rows may be many, they are made when first shown.
function table(columns, rows) {
  const head = el("tr", {}, ...columns.map(([title, , number]) => el("th", { scope: "col", class: number ? "number" : null }, title)));
  const body = el("tbody", {});
  for (const row of rows) {
    body.append(el("tr", {}, ...columns.map(([, cell, number]) => el("td", { class: number ? "number" : null }, cell(row) ?? "–"))));
  }
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" }, el("table", {}, el("thead", {}, head), body));
}

function numbers(title, columns, rows) {
  const made = el("details", { class: "numbers" }, el("summary", {}, title));
  made.addEventListener("toggle", () => made.open && made.childElementCount === 1 && made.append(table(columns, rows())), { once: true });
  return made;
}

function section(id, title, ...children) {
  const made = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
  document.getElementById("report").append(made);
  return made;
}

const button = (text, press, label) => el("button", { type: "button", onclick: press, "aria-label": label }, text);
