// The graph by modules: what is shown of it, and where. Ops of a closed module are one node.

const ops = data.ops;
const N = ops.id.length;
const FIRST_NODES = 80; // at most so many nodes when the page opens,
const FIRST_OPS = 6; // and of modules that hold more ops than that themselves none is open

// Modules, one tree for each phase: forward and backward of a module are two nodes.
class Group {
  constructor(parent, name, phase, path) {
    Object.assign(this, {
      parent,
      name,
      phase,
      path,
      groups: new Map(),
      own: [],
      ops: [],
      open: false,
    });
    this.depth = parent ? parent.depth + 1 : 0;
  }
}

const roots = ops.phases.map((phase, p) => new Group(null, phase, p, ""));
const groupOf = new Array(N);

function plantGroups() {
  for (let i = 0; i < N; i++) {
    let group = roots[ops.phase[i]];
    group.ops.push(i);
    const path = ops.modules[ops.module[i]];
    for (const name of path ? path.split(".") : []) {
      if (!group.groups.has(name))
        group.groups.set(
          name,
          new Group(group, name, group.phase, group.path ? `${group.path}.${name}` : name),
        );
      group = group.groups.get(name);
      group.ops.push(i);
    }
    group.own.push(i);
    groupOf[i] = group;
  }
}

const allGroups = (group) => [group, ...[...group.groups.values()].flatMap(allGroups)];

// Opens modules from the top, one level after the other, as long as there is room for all of it.
function openSome() {
  let level = roots.filter((root) => root.ops.length);
  let shown = level.length;
  while (level.length) {
    const opened = level.filter((group) => !group.depth || group.own.length <= FIRST_OPS);
    const inside = opened.reduce((sum, group) => sum + group.groups.size + group.own.length, 0);
    shown += inside - opened.length;
    if (opened.some((group) => group.depth) && shown > FIRST_NODES) return;
    for (const group of opened) group.open = true;
    level = opened.flatMap((group) => [...group.groups.values()]);
  }
}

// How many edges are on the longest path from a source to every op.
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

// What stands for an op: itself, or the outermost closed module that it is in.
function shownAs(i) {
  let closed = null;
  for (let group = groupOf[i]; group; group = group.parent) if (!group.open) closed = group;
  return closed ?? i;
}

const NODE = { width: 222, height: 28, gapX: 16, gapY: 24 };

// Nodes with their places, and the edges between them.
function arrange() {
  const nodes = new Map();
  const nodeOf = new Array(N);
  for (let i = 0; i < N; i++) {
    const key = shownAs(i);
    if (!nodes.has(key)) nodes.set(key, { key, ops: [], into: [], from: [], layer: 0, x: 0, y: 0 });
    nodeOf[i] = nodes.get(key);
    nodeOf[i].ops.push(i);
  }
  const list = [...nodes.values()];
  for (const node of list) describe(node);
  const edges = new Map();
  list.forEach((node, number) => (node.number = number));
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
  const layers = layered(list);
  order(layers);
  return { nodes: list, edges: [...edges.values()], layers, nodeOf };
}

function describe(node) {
  const cost = new Map();
  node.rank = 0;
  node.cost_ns = 0;
  for (const i of node.ops) {
    cost.set(ops.device[i], (cost.get(ops.device[i]) ?? 0) + ops.cost_ns[i] + 1e-6);
    node.rank += depthOf[i] / node.ops.length;
    node.cost_ns += ops.cost_ns[i];
  }
  node.devices = [...cost].sort((a, b) => a[0] - b[0]);
  node.isGroup = node.key instanceof Group;
  node.label = node.isGroup ? groupLabel(node.key) : opLabel(node.key);
}

const groupLabel = (group) => group.path || group.name;

function opLabel(i) {
  const module = ops.modules[ops.module[i]];
  return module ? `${module} · ${ops.kinds[ops.kind[i]]}` : ops.kinds[ops.kind[i]];
}

// A closed module may read what it feeds; edges against the order of mean depths do not count.
function layered(list) {
  const sorted = [...list].sort((a, b) => a.rank - b.rank || a.number - b.number);
  sorted.forEach((node, at) => (node.at = at));
  for (const node of sorted)
    for (const { a } of node.into)
      if (a.at < node.at) node.layer = Math.max(node.layer, a.layer + 1);
  for (const node of sorted.toReversed()) {
    if (node.into.some(({ a }) => a.at < node.at)) continue; // what reads nothing stands by its reader
    const readers = node.from.filter(({ b }) => b.at > node.at).map(({ b }) => b.layer);
    if (readers.length) node.layer = Math.max(0, Math.min(...readers) - 1);
  }
  const layers = [];
  for (const node of sorted) (layers[node.layer] ??= []).push(node);
  return layers.filter(Boolean);
}

// Sugiyama, Tagawa and Toda (1981): layers are sorted by the mean place of neighbours, up and down.
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

// Nodes as near to where they wish to be as their distances allow: runs that touch move as one.
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

plantGroups();
openSome();
