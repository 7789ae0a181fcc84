// Layout of the graph: layers of nodes by dependencies, and positions within layers.

// Length in edges of the longest path from a source to each op.
function depths(successors) {
  const waiting = new Int32Array(N);
  for (const v of ops.target) waiting[v]++;
  let level = [...Array(N).keys()].filter((i) => !waiting[i]);
  const depth = new Float64Array(N);
  for (let d = 0; level.length; d++) {
    const next = [];
    for (const i of level) {
      depth[i] = d;
      for (const v of successors[i]) if (--waiting[v] === 0) next.push(v);
    }
    level = next;
  }
  return depth;
}

const successorsOf = Array.from({ length: N }, () => []);
const edgesInto = Array.from({ length: N }, () => []);
const edgesFrom = Array.from({ length: N }, () => []);
ops.source.forEach((u, e) => {
  successorsOf[u].push(ops.target[e]);
  edgesFrom[u].push(e);
  edgesInto[ops.target[e]].push(e);
});
const depthOf = depths(successorsOf);
const isTied = (i) => edgesInto[i].length + edgesFrom[i].length > 0;

const NARROW = 222;
const BROAD = 440;
const NODE = { width: NARROW, height: 28, gapX: 16, gapY: 24 };

// Returns nodes with positions, and the edges between them.
function arrange() {
  const alike = new Map(layered(shown(shownAs)).flatMap(alikeIn));
  const folded = (i) => (opened.has(likenessOf(i)) ? null : alike.get(i));
  const found = shown((i) => folded(i) ?? shownAs(i));
  for (const node of found.nodes) if (!node.isGroup) node.alike = alike.get(node.key);
  const layers = layered(found);
  NODE.width = NARROW;
  order(layers);
  widen(found.nodes);
  return { ...found, layers };
}

// Widens nodes to fit their labels while the graph stays within view.
function widen(list) {
  const before = NODE.width + NODE.gapX;
  const xs = list.map((node) => node.x);
  const least = xs.reduce((a, b) => Math.min(a, b), 0);
  const pitches = (xs.reduce((a, b) => Math.max(a, b), 0) - least) / before;
  const space = viewWidth() - BESIDE.left - BESIDE.right;
  const room = (space - pitches * NODE.gapX) / (pitches + 1);
  const wanted = list.reduce((most, node) => Math.max(most, wholeWidth(node)), NARROW);
  NODE.width = Math.max(Math.min(wanted, room, BROAD), NARROW);
  for (const node of list) node.x *= (NODE.width + NODE.gapX) / before;
}

// The nodes that represent ops, and the edges between them.
function shown(keyOf) {
  const nodes = new Map();
  const nodeOf = new Array(N);
  for (let i = 0; i < N; i++) {
    const key = keyOf(i);
    if (!nodes.has(key)) nodes.set(key, { key, ops: [], into: [], from: [], layer: 0, x: 0, y: 0 });
    nodeOf[i] = nodes.get(key);
    nodeOf[i].ops.push(i);
  }
  const list = [...nodes.values()];
  list.forEach((node, number) => Object.assign(node, { number }));
  for (const node of list) describe(node);
  const edges = new Map();
  ops.source.forEach((u, e) => {
    const [a, b] = [nodeOf[u], nodeOf[ops.target[e]]];
    if (a === b) return;
    const key = `${a.number},${b.number}`;
    if (!edges.has(key)) {
      const edge = { a, b, bytes: 0, crosses: false };
      edges.set(key, edge);
      a.from.push(edge);
      b.into.push(edge);
    }
    const edge = edges.get(key);
    edge.bytes += ops.bytes[e];
    edge.crosses ||= ops.device[u] !== ops.device[ops.target[e]];
  });
  return { nodes: list, edges: [...edges.values()], nodeOf };
}

function describe(node) {
  const cost = new Map();
  node.cost_ns = 0;
  for (const i of node.ops) {
    cost.set(ops.device[i], (cost.get(ops.device[i]) ?? 0) + ops.cost_ns[i] + 1e-6);
    node.cost_ns += ops.cost_ns[i];
  }
  const tied = node.ops.filter(isTied);
  node.rank = tied.reduce((sum, i) => sum + depthOf[i], 0) / Math.max(tied.length, 1);
  node.devices = [...cost].sort((a, b) => a[0] - b[0]);
  node.isGroup = typeof node.key !== "number";
  node.label = node.isGroup ? groupLabel(node.key) : opLabel(node.key);
}

// Layers by longest path from nodes without inputs. Closed modules may form cycles: only within
// a cycle, edges against the order of mean depths are ignored.
function layered({ nodes: list, nodeOf }) {
  numberComponents(list);
  const sorted = list.toSorted(
    (a, b) => b.component - a.component || a.rank - b.rank || a.number - b.number,
  );
  sorted.forEach((node, at) => (node.at = at));
  for (const node of sorted)
    for (const { a } of node.into)
      if (a.at < node.at) node.layer = Math.max(node.layer, a.layer + 1);
  for (const node of sorted.toReversed()) {
    if (node.into.some(({ a }) => a.at < node.at)) continue; // sources move next to readers
    const readers = node.from.filter(({ b }) => b.at > node.at).map(({ b }) => b.layer);
    if (readers.length) node.layer = Math.max(0, Math.min(...readers) - 1);
  }
  for (const node of list) // isolated nodes are placed beside others of their module
    if (!node.into.length && !node.from.length) node.layer = nodeOf[companion(node)]?.layer ?? 0;
  const layers = [];
  for (const node of list) (layers[node.layer] ??= []).push(node);
  return layers.filter(Boolean);
}

// An op with edges in the innermost module around a node that has one.
function companion(node) {
  for (let group = outerOf(node); group; group = group.parent) {
    const found = group.ops.find(isTied);
    if (found !== undefined) return found;
  }
}

// Tarjan (1972): numbers strongly connected components, lower than those of their inputs.
function numberComponents(list) {
  const waiting = []; // visited, not in a component yet
  let visits = 0;
  let components = 0;
  for (const start of list) {
    const path = start.visit == null ? [start] : [];
    while (path.length) {
      const node = path.at(-1);
      if (node.visit == null) {
        node.visit = node.least = visits++;
        node.seen = 0;
        waiting.push(node);
      }
      const next = node.from[node.seen++]?.b;
      if (next) {
        if (next.visit == null) path.push(next);
        else if (next.component == null) node.least = Math.min(node.least, next.visit);
        continue;
      }
      path.pop();
      if (path.length) path.at(-1).least = Math.min(path.at(-1).least, node.least);
      if (node.least < node.visit) continue;
      for (const member of waiting.splice(waiting.lastIndexOf(node))) member.component = components;
      components++;
    }
  }
}

// Sugiyama, Tagawa and Toda (1981): sort layers by mean position of neighbours, up and down.
function order(layers) {
  const pitch = NODE.width + NODE.gapX;
  layers.forEach((layer, at) =>
    layer.forEach((node, k) =>
      Object.assign(node, {
        layer: at,
        x: (k - (layer.length - 1) / 2) * pitch,
        y: at * (NODE.height + NODE.gapY),
      }),
    ),
  );
  for (let sweep = 0; sweep < 8; sweep++) {
    const down = sweep % 2 === 0;
    for (const layer of down ? layers : layers.toReversed()) {
      for (const node of layer) {
        const near = (
          down ? node.into.map((edge) => edge.a) : node.from.map((edge) => edge.b)
        ).filter((other) => other.layer !== node.layer);
        node.wish = near.length
          ? near.reduce((sum, other) => sum + other.x, 0) / near.length
          : node.x;
      }
      settle(
        layer.sort((a, b) => a.wish - b.wish || a.number - b.number),
        pitch,
      );
    }
  }
}

// Places nodes as close to their desired positions as spacing allows; touching runs move as one.
function settle(layer, pitch) {
  const runs = [];
  for (const node of layer) {
    runs.push({ sum: node.wish, nodes: [node] });
    for (
      let last = runs.at(-1), before = runs.at(-2);
      before && centre(before, pitch).end > centre(last, pitch).begin;
      last = runs.at(-1), before = runs.at(-2)
    ) {
      runs.pop();
      before.sum += last.sum;
      before.nodes.push(...last.nodes);
    }
  }
  for (const run of runs)
    run.nodes.forEach((node, k) => (node.x = centre(run, pitch).begin + (k + 0.5) * pitch));
}

function centre(run, pitch) {
  const middle = run.sum / run.nodes.length;
  const half = (run.nodes.length * pitch) / 2;
  return { begin: middle - half, end: middle + half };
}
