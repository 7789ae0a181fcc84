// The placed graph on a canvas, with search, details and modules that can be opened.

const graph = {
  layout: null,
  selected: null,
  x: 0,
  y: 0,
  scale: 1,
  fits: true,
  view: null,
  details: null,
  found: null,
};
const GRAPH_HEIGHT = 620;
const MAP_WIDTH = 76;
const READABLE = 0.45; // scale from which nodes have labels
const BESIDE = { left: 20, right: 60 }; // margins of the graph; edges bow to the right
const WHOLE = 0.8; // scale from which most labels are complete
const SHORT_PHASES = ["", "bwd ", "opt "]; // forward, backward, optimizer
const LISTED = 12;
const LONGEST = 8; // number of ops that fit beside the graph
const CROWDED = 400; // number of edges from which they are drawn fainter

function graphSection() {
  const host = el("div", { class: "canvas" });
  graph.details = el("aside", { class: "details", "aria-live": "polite", "aria-label": "details" });
  graph.found = el("output", { class: "found" });
  const query = el("input", {
    type: "search",
    id: "find-op",
    placeholder: "name of an op or a module",
    autocomplete: "off",
    spellcheck: "false",
    oninput: () => suggest(query.value),
    onkeydown: (event) => event.key === "Enter" && chooseFirst(query.value),
  });
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
    el(
      "p",
      {},
      `${plural(N, "op")} of ${plural(ops.modules.filter(Boolean).length, "module")}, from top to bottom by what reads what. Colours and numbers are devices; a module on several is split by their time. Edges between devices are dashed; +2 is a closed module of 2 ops, ×4 are 4 like ops of one module, bwd its backward, opt its update.`,
    ),
    devicesLegend(),
    tools,
    graph.matches,
    el("div", { class: "split" }, host, graph.details),
    el(
      "p",
      { class: "hint" },
      "Drag to move; click for details, double-click to open or close a module. With the graph in focus: arrow keys walk along edges, Enter opens, C closes the module, + and − or the wheel zoom, 0 fits.",
    ),
    numbers("Ops per module and device", moduleColumns(), () =>
      roots
        .flatMap(allGroups)
        .filter((group) => group.ops.length && (group.depth < 3 || !group.parent)),
    ),
    numbers(`All ${plural(N, "op")}`, opColumns(), () => [...Array(N).keys()]),
  );
  graph.view = surface(
    host,
    GRAPH_HEIGHT,
    "graph of ops; arrow keys walk along its edges",
    drawGraph,
  );
  const canvas = graph.view.canvas;
  rebuild();
  closeUntilReadable();
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
    ["parameters and buffers", (i) => bytes(ops.parameter_bytes[i]), true],
  ];
}

function moduleColumns() {
  const on = (group, device) => group.ops.filter((i) => ops.device[i] === device).length;
  return [
    ["module", (group) => breakable(groupLabel(group))],
    ["phase", (group) => ops.phases[group.phase]],
    ...data.devices.map((device, d) => [
      device.name,
      (group) => (on(group, d) ? count(on(group, d)) : ""),
      true,
    ]),
    ["time", (group) => nanoseconds(group.ops.reduce((sum, i) => sum + ops.cost_ns[i], 0)), true],
  ];
}

function rebuild(keep) {
  const before = keep && nodeFor(keep);
  const place = before && { x: before.x, y: before.y };
  graph.layout = arrange();
  const after = keep && nodeFor(keep);
  if (after) graph.selected = after;
  if (place && after) {
    graph.x += place.x - after.x; // keep the opened or closed node in place
    graph.y += place.y - after.y;
    graph.view.redraw();
  } else beginGraph();
}

// The node that shows an op, or the first op of a module.
function nodeFor(key) {
  return graph.layout?.nodeOf[typeof key === "number" ? key : key.ops[0]] ?? null;
}

function extent() {
  const nodes = graph.layout.nodes;
  const xs = nodes.map((node) => node.x);
  const least = xs.reduce((a, b) => Math.min(a, b), 0) - NODE.width / 2 - BESIDE.left;
  const most = xs.reduce((a, b) => Math.max(a, b), 0) + NODE.width / 2 + BESIDE.right;
  return {
    left: least,
    right: most,
    top: -NODE.height,
    bottom: (graph.layout.layers.length - 1) * (NODE.height + NODE.gapY) + 2 * NODE.height,
  };
}

const viewWidth = () => (graph.view.canvas.parentElement.clientWidth || 800) - MAP_WIDTH - 16;

// Fits the whole graph if labels stay complete, else its width, from the start.
function fitGraph() {
  const { left, right, top, bottom } = extent();
  const wide = Math.min(viewWidth() / (right - left), 1);
  const whole = Math.min(wide, GRAPH_HEIGHT / (bottom - top));
  graph.scale = whole < WHOLE ? wide : whole;
  graph.x = (left + right) / 2;
  const half = GRAPH_HEIGHT / graph.scale / 2;
  graph.y = Math.min((top + bottom) / 2, top + half);
  graph.view.redraw();
}

// Fits the graph; if labels would be too small, the first layer or the part of it that fits.
function beginGraph() {
  fitGraph();
  graph.fits = graph.scale >= READABLE;
  if (graph.fits) return;
  graph.scale = WHOLE;
  const first = graph.layout.layers[0];
  const [begin, end] = [first[0].x - NODE.width / 2, first.at(-1).x + NODE.width / 2];
  graph.x = Math.min((begin + end) / 2, begin + viewWidth() / WHOLE / 2);
  graph.y = extent().top + GRAPH_HEIGHT / WHOLE / 2;
}

// Closes innermost modules until labels fit.
function closeUntilReadable() {
  while (!graph.fits) {
    const open = roots.flatMap(allGroups).filter((group) => group.open && group.depth);
    if (!open.length) return;
    const deepest = Math.max(...open.map((group) => group.depth));
    for (const group of open) if (group.depth === deepest) group.open = false;
    rebuild();
  }
}

function openAll(open) {
  for (const group of roots.flatMap(allGroups)) group.open = open || group.depth === 0;
  opened.clear();
  if (open) for (let i = 0; i < N; i++) opened.add(likenessOf(i));
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

// Opens the modules around an op and scrolls to it.
function reveal(key, focus) {
  const group = key instanceof Group ? key.parent : groupOf[key];
  for (let outer = group; outer; outer = outer.parent) outer.open = true;
  if (key instanceof Group) key.open = false;
  else opened.add(likenessOf(key));
  rebuild(key);
  graph.scale = Math.max(graph.scale, 0.9);
  select(nodeFor(key), true);
  if (focus) graph.view.canvas.focus({ preventScroll: true });
}
