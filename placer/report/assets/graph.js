// Where everything runs: the graph on a canvas, with search, details and modules that open.

const graph = { layout: null, selected: null, x: 0, y: 0, scale: 1, view: null, details: null, found: null };
const GRAPH_HEIGHT = 620;
const MAP_WIDTH = 76;
const READABLE = 0.56; // from this scale on nodes have labels
const SHORT_PHASES = ["", "bwd ", "opt "]; // forward, backward, optimizer
const LISTED = 12;
const CROWDED = 400; // edges: more of them are drawn fainter

function graphSection() {
  const host = el("div", { class: "canvas" });
  graph.details = el("aside", { class: "details", "aria-live": "polite", "aria-label": "details" });
  graph.found = el("output", { class: "found" });
  const query = el("input", { type: "search", id: "find-op", placeholder: "name of an op or a module", autocomplete: "off", spellcheck: "false", oninput: () => suggest(query.value), onkeydown: (event) => event.key === "Enter" && chooseFirst(query.value) });
  graph.matches = el("ul", { class: "matches" });
  const tools = el(
    "div",
    { class: "tools" },
    el("label", { for: "find-op" }, "Find"),
    query,
    graph.found,
    el("span", { class: "space" }),
    button("Open all", () => openAll(true)),
    button("Close all", () => openAll(false)),
    button("−", () => zoomGraph(1 / 1.3), "zoom out"),
    button("+", () => zoomGraph(1.3), "zoom in"),
    button("Fit", fitGraph),
  );
  section(
    "where",
    "Where everything runs",
    el("p", {}, `${plural(N, "op")} of ${plural(ops.modules.filter(Boolean).length, "module")}, from top to bottom by what reads what. Colours and numbers are devices; a module on several is split by their time. Edges between devices are dashed; +2 is a closed module of 2 ops, bwd its backward, opt its update.`),
    devicesLegend(),
    tools,
    graph.matches,
    el("div", { class: "split" }, host, graph.details),
    el("p", { class: "hint" }, "Drag to move; click for details, double-click to open or close a module. With the graph in focus: arrow keys walk along edges, Enter opens, C closes the module, + and − or the wheel zoom, 0 fits."),
    numbers("Ops per module and device", moduleColumns(), () => roots.flatMap(allGroups).filter((group) => group.ops.length && (group.depth < 3 || !group.parent))),
    numbers(`All ${plural(N, "op")}`, opColumns(), () => [...Array(N).keys()]),
  );
  graph.view = surface(host, GRAPH_HEIGHT, "graph of ops; arrow keys walk along its edges", drawGraph);
  const canvas = graph.view.canvas;
  rebuild();
  listenToPointer(canvas);
  canvas.addEventListener("keydown", graphKey);
  showDetails();
}

const secondsOf = (i) => nanoseconds(ops.cost_ns[i]);

function opColumns() {
  return [
    ["op", (i) => breakable(ops.id[i])],
    ["device", (i) => deviceName(ops.device[i])],
    ["time", secondsOf, true],
    ["FLOPs", (i) => flops(ops.flops[i]), true],
    ["output", (i) => bytes(ops.output_bytes[i]), true],
    ["parameters", (i) => bytes(ops.parameter_bytes[i]), true],
  ];
}

function moduleColumns() {
  const on = (group, device) => group.ops.filter((i) => ops.device[i] === device).length;
  return [
    ["module", (group) => breakable(groupLabel(group))],
    ["phase", (group) => ops.phases[group.phase]],
    ...data.devices.map((device, d) => [device.name, (group) => (on(group, d) ? count(on(group, d)) : ""), true]),
    ["time", (group) => nanoseconds(group.ops.reduce((sum, i) => sum + ops.cost_ns[i], 0)), true],
  ];
}

// ---- what is shown ----

function rebuild(keep) {
  const before = keep && nodeFor(keep);
  const place = before && { x: before.x, y: before.y };
  graph.layout = arrange();
  const after = keep && nodeFor(keep);
  if (after) graph.selected = after;
  if (place && after) {
    graph.x += place.x - after.x; // what was opened or closed stays where it was
    graph.y += place.y - after.y;
    graph.view.redraw();
  } else fitGraph();
}

// The node that an op, or the first op of a module, is shown in.
function nodeFor(key) {
  return graph.layout?.nodeOf[key instanceof Group ? key.ops[0] : key] ?? null;
}

function extent() {
  const nodes = graph.layout.nodes;
  const xs = nodes.map((node) => node.x);
  const least = xs.reduce((a, b) => Math.min(a, b), 0) - NODE.width / 2 - 20;
  const most = xs.reduce((a, b) => Math.max(a, b), 0) + NODE.width / 2 + 60;
  return { left: least, right: most, top: -NODE.height, bottom: (graph.layout.layers.length - 1) * (NODE.height + NODE.gapY) + 2 * NODE.height };
}

// From its beginning, as wide as it is; where that would be too small to read, the middle of it.
function fitGraph() {
  const { left, right, top, bottom } = extent();
  const width = (graph.view.canvas.parentElement.clientWidth || 800) - MAP_WIDTH - 16;
  const whole = width / (right - left);
  graph.scale = whole < READABLE ? 0.8 : Math.min(whole, 1);
  graph.x = (left + right) / 2;
  const half = GRAPH_HEIGHT / graph.scale / 2;
  graph.y = Math.min((top + bottom) / 2, top + half);
  graph.view.redraw();
}

function openAll(open) {
  for (const group of roots.flatMap(allGroups)) group.open = open || group.depth === 0;
  graph.selected = null;
  rebuild();
  showDetails();
}

function toggle(group, open) {
  const shown = open ? group.ops[0] : group;
  group.open = open;
  rebuild(shown);
  showDetails();
}

function select(node, centre) {
  graph.selected = node;
  if (centre && node) [graph.x, graph.y] = [node.x, node.y];
  graph.view.redraw();
  showDetails();
}

// Opens what an op is in, and goes there.
function reveal(key, focus) {
  const group = key instanceof Group ? key.parent : groupOf[key];
  for (let outer = group; outer; outer = outer.parent) outer.open = true;
  if (key instanceof Group) key.open = false;
  rebuild(key);
  graph.scale = Math.max(graph.scale, 0.9);
  select(nodeFor(key), true);
  if (focus) graph.view.canvas.focus({ preventScroll: true });
}

// ---- drawing ----

const toScreen = (node) => ({ x: (node.x - graph.x) * graph.scale + (graph.view.width - MAP_WIDTH) / 2, y: (node.y - graph.y) * graph.scale + GRAPH_HEIGHT / 2 });

function drawGraph(view, colours) {
  const { context, width } = view;
  context.fillStyle = colours.surface;
  context.fillRect(0, 0, width, GRAPH_HEIGHT);
  context.save();
  context.beginPath();
  context.rect(0, 0, width - MAP_WIDTH, GRAPH_HEIGHT);
  context.clip();
  for (const edge of graph.layout.edges) drawEdge(context, edge, colours);
  for (const edge of graph.selected ? [...graph.selected.into, ...graph.selected.from] : []) drawEdge(context, edge, colours, true);
  for (const node of graph.layout.nodes) drawNode(context, node, colours, width);
  context.restore();
  drawMap(context, colours, width);
}

function drawEdge(context, { a, b, crosses }, colours, marked) {
  const [from, to] = [toScreen(a), toScreen(b)];
  const half = (NODE.height / 2) * graph.scale;
  if (Math.max(from.y, to.y) < -50 || Math.min(from.y, to.y) > GRAPH_HEIGHT + 50) return;
  context.beginPath();
  const span = b.layer - a.layer;
  if (span === 1) {
    const middle = (from.y + to.y) / 2;
    context.moveTo(from.x, from.y + half);
    context.bezierCurveTo(from.x, middle, to.x, middle, to.x, to.y - half);
  } else {
    const side = (NODE.width / 2) * graph.scale; // past the layers between, on the right
    const bow = Math.max(from.x, to.x) + side + Math.min(18 + 5 * Math.abs(span), 150) * graph.scale;
    context.moveTo(from.x + side, from.y);
    context.bezierCurveTo(bow, from.y, bow, to.y, to.x + side, to.y);
  }
  context.strokeStyle = marked ? colours.accent : colours.soft;
  const many = graph.layout.edges.length > CROWDED;
  context.globalAlpha = marked ? 1 : crosses ? (many ? 0.35 : 0.75) : many ? 0.16 : 0.28;
  context.lineWidth = marked ? 2 : 1;
  context.setLineDash(crosses ? [5, 3] : []);
  context.stroke();
  context.setLineDash([]);
  context.globalAlpha = 1;
}

function drawNode(context, node, colours, width) {
  const { x, y } = toScreen(node);
  const [w, h] = [NODE.width * graph.scale, NODE.height * graph.scale];
  if (x + w < 0 || x - w > width || y + h < 0 || y - h > GRAPH_HEIGHT) return;
  const readable = graph.scale >= READABLE;
  const tag = readable ? Math.min(26 * graph.scale, w) : w;
  const [left, top] = [x - w / 2, y - h / 2];
  context.fillStyle = colours.paper;
  context.fillRect(left, top, w, h);
  splitByDevice(context, node, left, top, tag, h);
  if (readable) labelNode(context, node, left, top, tag, w, h, colours);
  const chosen = node === graph.selected;
  context.strokeStyle = chosen ? colours.accent : colours.line;
  context.lineWidth = chosen ? 3 : 1;
  context.strokeRect(left - (chosen ? 2 : 0), top - (chosen ? 2 : 0), w + (chosen ? 4 : 0), h + (chosen ? 4 : 0));
}

function splitByDevice(context, node, left, top, width, height) {
  const total = node.devices.reduce((sum, [, cost]) => sum + cost, 0);
  let at = top;
  for (const [device, cost] of node.devices) {
    const part = (height * cost) / total;
    fillDevice(context, device, left, at, width, part);
    at += part;
  }
}

function labelNode(context, node, left, top, tag, w, h, colours) {
  const size = 12 * Math.min(Math.max(graph.scale, 0.9), 1.4);
  context.textBaseline = "middle";
  context.textAlign = "center";
  context.font = `600 ${size}px ${FONT}`;
  if (node.devices.length === 1) {
    const [[device]] = node.devices;
    labelDevice(context, device, String(device), left + tag / 2, top + h / 2 + 0.5);
  }
  context.textAlign = "left";
  context.fillStyle = colours.ink;
  context.font = `${node.isGroup ? 500 : 400} ${size}px ${FONT}`;
  const right = node.isGroup ? `${SHORT_PHASES[node.key.phase]}+${count(node.ops.length)}` : "";
  const space = right ? context.measureText(right).width + 8 : 0;
  context.fillText(fitted(context, node.label, w - tag - 14 - space), left + tag + 7, top + h / 2 + 0.5);
  context.fillStyle = colours.soft;
  context.textAlign = "right";
  context.font = `${size}px ${FONT}`;
  context.fillText(right, left + w - 7, top + h / 2 + 0.5);
}

// The whole graph on the right, with a frame around what is seen.
function mapPlace(width) {
  const { left, right, top, bottom } = extent();
  const scale = Math.min((MAP_WIDTH - 16) / (right - left), (GRAPH_HEIGHT - 20) / (bottom - top));
  const tall = Math.min((GRAPH_HEIGHT - 20) / (bottom - top), 8 * scale); // long graphs may be squeezed less
  return { x: (x) => width - MAP_WIDTH + 8 + (x - left) * scale, y: (y) => 10 + (y - top) * tall, scale, tall, left, top };
}

function drawMap(context, colours, width) {
  context.fillStyle = colours.paper;
  context.fillRect(width - MAP_WIDTH, 0, MAP_WIDTH, GRAPH_HEIGHT);
  context.fillStyle = colours.line;
  context.fillRect(width - MAP_WIDTH, 0, 1, GRAPH_HEIGHT);
  const map = mapPlace(width);
  for (const node of graph.layout.nodes) {
    splitByDevice(context, node, map.x(node.x - NODE.width / 2), map.y(node.y - NODE.height / 2), Math.max(NODE.width * map.scale, 2), Math.max(NODE.height * map.tall, 1));
  }
  const half = { x: (width - MAP_WIDTH) / graph.scale / 2, y: GRAPH_HEIGHT / graph.scale / 2 };
  const [x0, y0] = [Math.max(map.x(graph.x - half.x), width - MAP_WIDTH + 2), Math.max(map.y(graph.y - half.y), 2)];
  const [x1, y1] = [Math.min(map.x(graph.x + half.x), width - 2), Math.min(map.y(graph.y + half.y), GRAPH_HEIGHT - 2)];
  context.strokeStyle = colours.ink;
  context.lineWidth = 1.5;
  if (x1 > x0 && y1 > y0) context.strokeRect(x0, y0, x1 - x0, y1 - y0);
}
