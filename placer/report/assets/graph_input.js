// Mouse and keyboard input of the graph.

function zoomGraph(factor, at) {
  const centre = at ?? { x: (graph.view.width - MAP_WIDTH) / 2, y: GRAPH_HEIGHT / 2 };
  const before = fromScreen(centre);
  graph.scale = Math.min(3, Math.max(0.02, graph.scale * factor));
  const after = fromScreen(centre);
  graph.x += before.x - after.x;
  graph.y += before.y - after.y;
  graph.view.redraw();
}

const fromScreen = ({ x, y }) => ({
  x: (x - (graph.view.width - MAP_WIDTH) / 2) / graph.scale + graph.x,
  y: (y - GRAPH_HEIGHT / 2) / graph.scale + graph.y,
});

function nodeAt(point) {
  const { x, y } = fromScreen(point);
  return (
    graph.layout.nodes.find(
      (node) => Math.abs(node.x - x) <= NODE.width / 2 && Math.abs(node.y - y) <= NODE.height / 2,
    ) ?? null
  );
}

const pointOf = (event) => ({ x: event.offsetX, y: event.offsetY });

function listenToPointer(canvas) {
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = { ...pointOf(event), moved: false, onMap: event.offsetX > graph.view.width - MAP_WIDTH };
    canvas.setPointerCapture(event.pointerId);
    if (held.onMap) goOnMap(event);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return;
    const [dx, dy] = [event.offsetX - held.x, event.offsetY - held.y];
    if (!held.moved && Math.hypot(dx, dy) < 4) return;
    if (held.onMap) goOnMap(event);
    else {
      graph.x -= dx / graph.scale;
      graph.y -= dy / graph.scale;
      graph.view.redraw();
    }
    held = { ...held, ...pointOf(event), moved: true };
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held && !held.moved && !held.onMap) select(nodeAt(pointOf(event)));
    held = null;
  });
  canvas.addEventListener("pointercancel", () => (held = null));
  canvas.addEventListener("dblclick", (event) => {
    const node = event.offsetX < graph.view.width - MAP_WIDTH && nodeAt(pointOf(event));
    if (node) openOrClose(node);
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (document.activeElement !== canvas && !event.ctrlKey) return; // let the page scroll
      event.preventDefault();
      zoomGraph(Math.exp(-event.deltaY / 400), pointOf(event));
    },
    { passive: false },
  );
}

function goOnMap(event) {
  const map = mapPlace(graph.view.width);
  graph.y = (event.offsetY - 10) / map.tall + map.top;
  graph.x = (event.offsetX - graph.view.width + MAP_WIDTH - 8) / map.scale + map.left;
  graph.view.redraw();
}

function openOrClose(node) {
  if (node.isGroup) toggle(node.key, true);
  else closeAround(node);
}

const ARROWS = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };

function graphKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const node = graph.selected;
  if (event.key in ARROWS) walk(...ARROWS[event.key]);
  else if (event.key === "Enter" && node?.isGroup) toggle(node.key, true);
  else if (event.key.toLowerCase() === "c" && node) closeAround(node);
  else if (event.key === "+" || event.key === "=") zoomGraph(1.3);
  else if (event.key === "-") zoomGraph(1 / 1.3);
  else if (event.key === "0") fitGraph();
  else if (event.key === "Escape") select(null);
  else return;
  event.preventDefault();
}

function closeAround(node) {
  const group = outerOf(node);
  if (group?.depth) toggle(group, false);
}

// Moves the selection: up and down along edges, left and right within a layer.
function walk(dx, dy) {
  const node = graph.selected;
  if (!node) {
    select(graph.layout.layers[0][0], true);
    return;
  }
  const layer = graph.layout.layers[node.layer];
  const along = (dy > 0 ? node.from.map(({ b }) => b) : node.into.map(({ a }) => a)).filter(
    (other) => (other.layer - node.layer) * dy > 0,
  );
  const far = (other) => Math.abs(other.layer - node.layer) * 1e4 + Math.abs(other.x - node.x);
  const next = dx
    ? layer[layer.indexOf(node) + dx]
    : (along.sort((a, b) => far(a) - far(b))[0] ?? graph.layout.layers[node.layer + dy]?.[0]);
  if (next) select(next, true);
}
