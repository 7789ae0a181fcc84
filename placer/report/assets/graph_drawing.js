// Draws the graph: edges, nodes split by device, and a map on the right.

const SIZE = 12; // font size of labels, px
const SMALLEST = 0.9; // smallest share of that size
const TAG = 26; // width of the device tag
const PADDING = 14; // left and right of a label

const toScreen = (node) => ({
  x: (node.x - graph.x) * graph.scale + (graph.view.width - MAP_WIDTH) / 2,
  y: (node.y - graph.y) * graph.scale + GRAPH_HEIGHT / 2,
});

function drawGraph(view, colours) {
  const { context, width } = view;
  context.fillStyle = colours.surface;
  context.fillRect(0, 0, width, GRAPH_HEIGHT);
  context.save();
  context.beginPath();
  context.rect(0, 0, width - MAP_WIDTH, GRAPH_HEIGHT);
  context.clip();
  for (const edge of graph.layout.edges) drawEdge(context, edge, colours);
  for (const edge of graph.selected ? [...graph.selected.into, ...graph.selected.from] : [])
    drawEdge(context, edge, colours, true);
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
    const side = (NODE.width / 2) * graph.scale; // route around the layers in between
    const bow =
      Math.max(from.x, to.x) + side + Math.min(18 + 5 * Math.abs(span), 150) * graph.scale;
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
  const tag = readable ? Math.min(TAG * graph.scale, w) : w;
  const [left, top] = [x - w / 2, y - h / 2];
  context.fillStyle = colours.paper;
  context.fillRect(left, top, w, h);
  splitByDevice(context, node, left, top, tag, h);
  if (readable) labelNode(context, node, left, top, tag, w, h, colours);
  const chosen = node === graph.selected;
  context.strokeStyle = chosen ? colours.accent : colours.line;
  context.lineWidth = chosen ? 3 : 1;
  context.strokeRect(
    left - (chosen ? 2 : 0),
    top - (chosen ? 2 : 0),
    w + (chosen ? 4 : 0),
    h + (chosen ? 4 : 0),
  );
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

// Number and phase of the ops in a closed module or a group of alike ops.
function opsTold(node) {
  if (!node.isGroup) return "";
  const sign = node.key instanceof Alike ? "×" : "+";
  return `${SHORT_PHASES[node.key.phase]}${sign}${count(node.ops.length)}`;
}

const spaceFor = (context, right) => (right ? context.measureText(right).width + 8 : 0);

// Width of a node with its complete label, also at slightly smaller scales.
function wholeWidth(node) {
  const { context } = graph.view;
  context.font = `${node.isGroup ? 500 : 400} ${SIZE}px ${FONT}`;
  const label = context.measureText(node.label).width + spaceFor(context, opsTold(node));
  return Math.ceil(TAG + (PADDING + SMALLEST * label) / WHOLE);
}

function labelNode(context, node, left, top, tag, w, h, colours) {
  const size = SIZE * Math.min(Math.max(graph.scale, SMALLEST), 1.4);
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
  const right = opsTold(node);
  context.fillText(
    fitted(context, node.label, w - tag - PADDING - spaceFor(context, right)),
    left + tag + 7,
    top + h / 2 + 0.5,
  );
  context.fillStyle = colours.soft;
  context.textAlign = "right";
  context.font = `${size}px ${FONT}`;
  context.fillText(right, left + w - 7, top + h / 2 + 0.5);
}

// Position of the map on the right, which frames the visible part.
function mapPlace(width) {
  const { left, right, top, bottom } = extent();
  const scale = Math.min((MAP_WIDTH - 16) / (right - left), (GRAPH_HEIGHT - 20) / (bottom - top));
  const tall = Math.min((GRAPH_HEIGHT - 20) / (bottom - top), 8 * scale); // stretched in y by up to 8
  return {
    x: (x) => width - MAP_WIDTH + 8 + (x - left) * scale,
    y: (y) => 10 + (y - top) * tall,
    scale,
    tall,
    left,
    top,
  };
}

function drawMap(context, colours, width) {
  context.fillStyle = colours.paper;
  context.fillRect(width - MAP_WIDTH, 0, MAP_WIDTH, GRAPH_HEIGHT);
  context.fillStyle = colours.line;
  context.fillRect(width - MAP_WIDTH, 0, 1, GRAPH_HEIGHT);
  const map = mapPlace(width);
  for (const node of graph.layout.nodes) {
    splitByDevice(
      context,
      node,
      map.x(node.x - NODE.width / 2),
      map.y(node.y - NODE.height / 2),
      Math.max(NODE.width * map.scale, 2),
      Math.max(NODE.height * map.tall, 1),
    );
  }
  const half = { x: (width - MAP_WIDTH) / graph.scale / 2, y: GRAPH_HEIGHT / graph.scale / 2 };
  const [x0, y0] = [
    Math.max(map.x(graph.x - half.x), width - MAP_WIDTH + 2),
    Math.max(map.y(graph.y - half.y), 2),
  ];
  const [x1, y1] = [
    Math.min(map.x(graph.x + half.x), width - 2),
    Math.min(map.y(graph.y + half.y), GRAPH_HEIGHT - 2),
  ];
  context.strokeStyle = colours.ink;
  context.lineWidth = 1.5;
  if (x1 > x0 && y1 > y0) context.strokeRect(x0, y0, x1 - x0, y1 - y0);
}
