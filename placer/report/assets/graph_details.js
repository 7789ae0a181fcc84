// Search in the graph, and details of the selected node.

function matching(query) {
  const wanted = query.trim().toLowerCase();
  if (!wanted) return [];
  const groups = roots
    .flatMap(allGroups)
    .filter((group) => group.path.toLowerCase().includes(wanted));
  const found = [];
  for (let i = 0; i < N; i++) if (ops.id[i].toLowerCase().includes(wanted)) found.push(i);
  const exact = found.filter((i) => ops.id[i].toLowerCase() === wanted);
  return exact.length
    ? [...exact, ...groups, ...found.filter((i) => !exact.includes(i))]
    : [...groups, ...found];
}

const nameOf = (key) =>
  key instanceof Group
    ? `${groupLabel(key)} (${ops.phases[key.phase]}, ${plural(key.ops.length, "op")})`
    : ops.id[key];

function suggest(query) {
  const found = matching(query);
  graph.found.textContent = query.trim()
    ? found.length
      ? `${count(found.length)} found`
      : "nothing found"
    : "";
  const choices = found.slice(0, LISTED).map((key) =>
    el(
      "li",
      {},
      button(nameOf(key), () => goTo(key)),
    ),
  );
  graph.matches.replaceChildren(...choices);
}

function chooseFirst(query) {
  const [first] = matching(query);
  if (first !== undefined) goTo(first);
}

function goTo(key) {
  graph.matches.replaceChildren();
  reveal(key, true);
}

function showDetails() {
  const node = graph.selected;
  if (!node) graph.details.replaceChildren(...dearest());
  else if (node.isGroup) graph.details.replaceChildren(...groupDetails(node));
  else graph.details.replaceChildren(...opDetails(node.key));
}

// The costliest ops, shown while nothing is selected.
function dearest() {
  const sorted = [...ops.cost_ns.keys()]
    .sort((a, b) => ops.cost_ns[b] - ops.cost_ns[a])
    .slice(0, LONGEST);
  const lines = sorted.map((i) =>
    el(
      "li",
      {},
      badge(ops.device[i]),
      button(breakable(ops.id[i]), () => reveal(i)),
      secondsOf(i),
    ),
  );
  return [
    el("p", { class: "hint" }, "Nothing is selected. Click a node, or find an op by its name."),
    el("h4", {}, "The longest ops"),
    el("ul", { class: "neighbours" }, ...lines),
  ];
}

function facts(rows) {
  const list = el("dl", {});
  for (const [term, value] of rows)
    if (value != null) list.append(el("dt", {}, term), el("dd", {}, value));
  return list;
}

function opDetails(i) {
  const bar = barsOf[i][0];
  const step = data.timeline.step_ns;
  return [
    el("h3", {}, breakable(ops.id[i])),
    el("p", {}, deviceLabel(ops.device[i])),
    facts([
      ["operation", breakable(ops.kinds[ops.kind[i]])],
      ["phase", ops.phases[ops.phase[i]]],
      ["time", `${secondsOf(i)} (${share(ops.cost_ns[i], step)} of the step)`],
      [
        "runs from",
        bar == null
          ? null
          : `${nanoseconds(bars.start_ns[bar])} to ${nanoseconds(bars.end_ns[bar])}`,
      ],
      ["critical path", bar != null && isCritical[bar] ? "on it" : "not on it"],
      ["work", flops(ops.flops[i])],
      ["moves", bytes(ops.moved_bytes[i])],
      ["output", bytes(ops.output_bytes[i])],
      ["saved for backward", bytes(ops.saved_bytes[i])],
      ["parameters and buffers", bytes(ops.parameter_bytes[i])],
      ["memory it keeps", bytes(ops.resident_bytes[i])],
    ]),
    ...around(outerOf(nodeFor(i))),
    ...neighbours("Reads", edgesInto[i], ops.source),
    ...neighbours("Is read by", edgesFrom[i], ops.target),
  ];
}

function groupDetails(node) {
  const sum = (column) => node.ops.reduce((total, i) => total + column[i], 0);
  const on = (device) => node.ops.filter((i) => ops.device[i] === device);
  return [
    el("h3", {}, breakable(groupLabel(node.key))),
    ...node.devices.map(([device]) =>
      el(
        "p",
        {},
        deviceLabel(device),
        ` ${plural(on(device).length, "op")}, ${nanoseconds(on(device).reduce((total, i) => total + ops.cost_ns[i], 0))}`,
      ),
    ),
    facts([
      ["phase", ops.phases[node.key.phase]],
      ["ops", count(node.ops.length)],
      ["time", nanoseconds(node.cost_ns)],
      ["work", flops(sum(ops.flops))],
      ["outputs", bytes(sum(ops.output_bytes))],
      ["parameters and buffers", bytes(sum(ops.parameter_bytes))],
      ["memory it keeps", bytes(sum(ops.resident_bytes))],
    ]),
    button(node.key instanceof Alike ? "Open these ops" : "Open this module", () =>
      toggle(node.key, true),
    ),
    ...around(outerOf(node)),
  ];
}

// Buttons that close the open modules around a group.
function around(group) {
  const found = [];
  for (let outer = group; outer?.depth; outer = outer.parent) {
    const here = outer;
    found.unshift(
      el(
        "li",
        {},
        button(breakable(`Close ${groupLabel(here)}`), () => toggle(here, false)),
      ),
    );
  }
  return found.length ? [el("h4", {}, "In modules"), el("ul", {}, ...found)] : [];
}

function neighbours(title, edges, ends) {
  if (!edges.length) return [];
  const most = edges.slice(0, LISTED).map((e) =>
    el(
      "li",
      {},
      badge(ops.device[ends[e]]),
      button(breakable(ops.id[ends[e]]), () => reveal(ends[e])),
      bytes(ops.bytes[e]),
    ),
  );
  if (edges.length > LISTED)
    most.push(el("li", {}, "", el("span", {}, `and ${count(edges.length - LISTED)} more`)));
  return [el("h4", {}, title), el("ul", { class: "neighbours" }, ...most)];
}
