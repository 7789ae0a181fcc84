// Breakdown of each device's time, as text and tables.

const idleOf = (device, why) =>
  idle.device.reduce(
    (sum, d, k) =>
      d === device && idle.whys[idle.why[k]] === why
        ? sum + idle.end_ns[k] - idle.start_ns[k]
        : sum,
    0,
  );
const busyOf = (device) =>
  bars.op.reduce(
    (sum, op, bar) =>
      ops.device[op] === device ? sum + bars.end_ns[bar] - bars.start_ns[bar] : sum,
    0,
  );
const withShare = (ns) => (ns ? `${nanoseconds(ns)} (${share(ns, STEP)})` : "–");

function idleColumns() {
  const onHost = idle.why.includes(idle.whys.indexOf("host busy"));
  return [
    ["device", (d) => deviceLabel(d)],
    ["ops", (d) => count(ops.device.filter((of) => of === d).length), true],
    ["busy", (d) => withShare(busyOf(d)), true],
    ["waits for an op elsewhere", (d) => withShare(idleOf(d, "producer")), true],
    ["waits for a link", (d) => withShare(idleOf(d, "link busy")), true],
    ["waits for a transfer", (d) => withShare(idleOf(d, "transfer")), true],
    ...(onHost ? [["waits for its host", (d) => withShare(idleOf(d, "host busy")), true]] : []),
    ["nothing left", (d) => withShare(idleOf(d, "nothing left")), true],
  ];
}

function idleSentence() {
  const busy = data.devices.map((_, d) => busyOf(d));
  const used = busy.filter((ns) => ns > 0);
  if (used.length === 1)
    return `Only ${deviceName(busy.findIndex((ns) => ns > 0))} is used, it is busy ${share(used[0], STEP)} of the time.`;
  const least = busy.indexOf(Math.min(...used));
  if (busy[least] > 0.97 * STEP)
    return `Every device in use is busy for at least ${share(busy[least], STEP)} of it.`;
  const reasons = idle.whys.map((why) => [why, idleOf(least, why)]).sort((a, b) => b[1] - a[1]);
  const [why, ns] = reasons[0];
  const told = {
    producer: "waits for ops on other devices",
    "link busy": "waits until links are free",
    transfer: "waits for transfers",
    "host busy": "waits for its host thread",
    "nothing left": "has nothing left to do",
  }[why];
  return `${deviceName(least)} is the least busy of those in use, ${share(busy[least], STEP)} of the time; for most of the rest, ${withShare(ns)}, it ${told}.`;
}

function criticalSummary() {
  const lasts = (kind) =>
    critical.kind.reduce(
      (sum, k, at) =>
        critical.kinds[k] === kind ? sum + critical.end_ns[at] - critical.start_ns[at] : sum,
      0,
    );
  const number = critical.kind.filter((k) => critical.kinds[k] === "compute").length;
  const parts = [
    `${plural(number, "op")} ${number === 1 ? "takes" : "take"} ${withShare(lasts("compute"))}`,
  ];
  if (lasts("transfer")) parts.push(`transfers ${withShare(lasts("transfer"))}`);
  if (lasts("host busy")) parts.push(`the host thread ${withShare(lasts("host busy"))}`);
  if (lasts("link busy")) parts.push(`waiting for links ${withShare(lasts("link busy"))}`);
  return el(
    "p",
    { class: "after" },
    `The critical path decides how long the step is: ${parts.join(", ")}.`,
  );
}

const between = (from, to) =>
  from === to ? deviceName(from) : `${deviceName(from)} → ${deviceName(to)}`;

function criticalColumns() {
  return [
    ["from", (at) => nanoseconds(critical.start_ns[at]), true],
    ["lasts", (at) => nanoseconds(critical.end_ns[at] - critical.start_ns[at]), true],
    ["what", (at) => critical.kinds[critical.kind[at]]],
    ["where", (at) => between(critical.from[at], critical.to[at])],
    ["op", (at) => breakable(barName(critical.bar[at]))],
  ];
}

function transferColumns() {
  return [
    ["from", (k) => nanoseconds(transfers.start_ns[k]), true],
    ["lasts", (k) => nanoseconds(transfers.end_ns[k] - transfers.start_ns[k]), true],
    ["waited", (k) => nanoseconds(transfers.start_ns[k] - transfers.request_ns[k]), true],
    ["size", (k) => bytes(transfers.bytes[k]), true],
    ["where", (k) => between(transfers.from[k], transfers.to[k])],
    ["output of", (k) => breakable(barName(transfers.bar[k]))],
  ];
}
