// Ops by module, and the nodes that represent them: a closed module is one node, and so are many
// alike ops side by side.

const ops = data.ops;
const N = ops.id.length;
const FIRST_NODES = 80; // largest number of nodes when the page opens
const FIRST_OPS = 6; // modules with more own ops than this start closed
const MANY = 4; // number of alike ops side by side that become one node

// Modules, one tree per phase: forward and backward of a module are two nodes.
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

// Opens modules level by level from the top while all of the level fits.
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

// The key of the node for an op: the op, or the outermost closed module around it.
function shownAs(i) {
  let closed = null;
  for (let group = groupOf[i]; group; group = group.parent) if (!group.open) closed = group;
  return closed ?? i;
}

// Ops of one module and kind side by side, such as those of a loop over tokens: one node, like a
// closed module, until it is opened.
class Alike {
  constructor(members) {
    this.ops = members;
    this.parent = groupOf[members[0]];
    this.depth = this.parent.depth + 1;
    this.phase = this.parent.phase;
    this.path = opLabel(members[0]);
  }

  set open(open) {
    const likeness = likenessOf(this.ops[0]);
    if (open) opened.add(likeness);
    else opened.delete(likeness);
  }
}

const opened = new Set(); // likenesses whose ops are shown separately
const likenessOf = (i) => `${ops.phase[i]},${ops.module[i]},${ops.kind[i]}`;

// [op, group] for each op of a layer that has many alike ops.
function alikeIn(layer) {
  const found = new Map();
  for (const { key } of layer.filter((node) => !node.isGroup)) {
    const likeness = likenessOf(key);
    if (!found.has(likeness)) found.set(likeness, []);
    found.get(likeness).push(key);
  }
  return [...found.values()]
    .filter((members) => members.length >= MANY)
    .flatMap((members) => {
      const alike = new Alike(members);
      return members.map((i) => [i, alike]);
    });
}

// What contains a node and closes it: a module, or a group of alike ops that was opened.
const outerOf = (node) => (node.isGroup ? node.key.parent : (node.alike ?? groupOf[node.key]));

const groupLabel = (group) => group.path || group.name;

function opLabel(i) {
  const module = ops.modules[ops.module[i]];
  return module ? `${module} · ${ops.kinds[ops.kind[i]]}` : ops.kinds[ops.kind[i]];
}

plantGroups();
openSome();
