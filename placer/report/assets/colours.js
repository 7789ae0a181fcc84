// Colours and patterns of devices, and legible labels on them.

// Okabe and Ito's colour-blind safe palette (jfly.uni-koeln.de/color, 2008), with grey for black.
// From the ninth device on it repeats with patterns; every mark also has a number.
const PALETTE = [
  "#0072B2",
  "#E69F00",
  "#009E73",
  "#CC79A7",
  "#56B4E9",
  "#D55E00",
  "#F0E442",
  "#999999",
];

const colourOf = (device) => PALETTE[device % PALETTE.length];
const patternOf = (device) => Math.floor(device / PALETTE.length) % 4;

function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.22 ? "#10151c" : "#ffffff";
}

function theme() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    paper: of("paper"),
    surface: of("surface"),
    ink: of("ink"),
    soft: of("soft"),
    line: of("line"),
    accent: of("accent"),
  };
}

function tile(draw, size = 8) {
  const canvas = el("canvas", { width: size, height: size });
  draw(canvas.getContext("2d"), size);
  return canvas;
}

// Strokes that distinguish devices or reasons without colour.
const STROKES = {
  diagonal: [
    [-2, 10, 10, -2],
    [-2, 2, 2, -2],
    [6, 10, 10, 6],
  ],
  level: [[0, 4, 8, 4]],
  upright: [[4, 0, 4, 8]],
  cross: [
    [0, 0, 8, 8],
    [0, 8, 8, 0],
  ],
  dots: [
    [1.5, 2, 2.5, 2],
    [5.5, 6, 6.5, 6],
  ],
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
    context.fillStyle = pattern(
      context,
      ["", "diagonal", "dots", "cross"][patternOf(device)],
      inkOn(colourOf(device)),
    );
    context.fillRect(x, y, width, height);
  }
}

// Draws a label on a device's colour, with an outline on patterns.
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
  return el(
    "span",
    {
      class: `badge p${patternOf(device)}`,
      style: `--own:${colour};color:${inkOn(colour)}`,
      "aria-hidden": "true",
    },
    String(device),
  );
}

const deviceName = (device) => data.devices[device].name;
const deviceLabel = (device) => el("span", { class: "device" }, badge(device), deviceName(device));
const legend = (...items) =>
  el("ul", { class: "legend" }, ...items.map((item) => el("li", {}, item)));
const devicesLegend = () => legend(...data.devices.map((_, d) => deviceLabel(d)));
