// The page and the order of its sections.

function tileOf(value, what) {
  return el("div", { class: "figure" }, el("strong", {}, value), el("span", {}, what));
}

const OBJECTIVES = {
  latency: "step",
  throughput: "time of a further micro-batch",
  "max-load": "largest load of a device",
};

function opening() {
  const used = new Set(ops.device).size;
  const gap = data.lower_bound_s && data.step_s ? data.step_s / data.lower_bound_s - 1 : null;
  document.getElementById("report").append(
    el(
      "header",
      {},
      el("p", { class: "kind" }, "Placement report"),
      el("h1", {}, data.graph || "unnamed graph"),
      el("p", { class: "verdict" }, data.verdict),
      el(
        "div",
        { class: "figures" },
        tileOf(time(data.step_s), `${OBJECTIVES[data.objective]}, ${CLOCKS[data.judged]}${byWall(data)}`),
        tileOf(
          data.speed_up == null ? "–" : `${data.speed_up.toFixed(2)}×`,
          `as fast as the best single device, ${CLOCKS[data.speed_up_is]}`,
        ),
        tileOf(
          gap == null ? "–" : percent(Math.abs(gap)),
          gap < 0 ? "below the lower bound, by costs of ops that ran slower" : "above the lower bound",
        ),
        tileOf(`${used} of ${data.devices.length}`, "devices in use"),
      ),
      el(
        "nav",
        { "aria-label": "sections" },
        ...[
          ["won", "Gain"],
          ["where", "Graph"],
          ["when", "Timeline"],
          ["memory", "Memory"],
          ["search", "Search"],
          ["next", "Next"],
        ].map(([id, name]) => el("a", { href: `#${id}` }, name)),
      ),
    ),
  );
}

const EXPLAINED = {
  "warm start": "the placement of --start-from",
  "where allowed": "what pins or missing costs keep off that device is elsewhere",
  "unplaced": "the model as it is, with torch's threads on all cores, or on one device",
};

function wonSection() {
  const chart = el("div", {
    class: "chart wide",
    tabindex: "0",
    role: "region",
    "aria-label": "candidates as bars",
  });
  const measured = wasMeasured;
  const rows = sortedCandidates();
  section(
    "won",
    "What was won",
    el("p", {}, wonSentence(rows)),
    data.objective === "latency"
      ? null
      : el(
          "p",
          { class: "hint" },
          `Times are of what the search made small: ${OBJECTIVES[data.objective]}.`,
        ),
    legend(
      el(
        "span",
        { class: "device" },
        el("span", { class: "key predicted" }),
        "predicted by the simulator",
      ),
      ...(measured
        ? [
            el(
              "span",
              { class: "device" },
              el("span", { class: "key measured" }),
              `${CLOCKS[isCpuClock ? "cpu-clock" : "measured"]}, median; the whisker spans the quartiles`,
            ),
          ]
        : []),
      el("span", { class: "device" }, el("span", { class: "key bound" }), "lower bound"),
      ...(rows.some((row) => row.speed_up != null && inBrackets(row))
        ? [el("span", {}, "(1.00×) a speed-up that is predicted, since it was not run")]
        : []),
    ),
    chart,
    ...Object.entries(EXPLAINED)
      .filter(([name]) => rows.some((row) => row.name === name || row.name.endsWith(` ${name}`)))
      .map(([name, told]) => el("p", { class: "hint" }, `${name}: ${told}.`)),
    ...(data.remarks.length
      ? [el("ul", { class: "remarks" }, ...data.remarks.map((remark) => el("li", {}, remark)))]
      : []),
    numbers("The numbers", candidateColumns(measured), () => rows),
  );
  candidateBars(chart);
}

function wonSentence(rows) {
  const chosen = rows.find((row) => row.best);
  const single = rows.find((row) => row.name === data.best_single);
  const how = ({ measured }) =>
    measured ? CLOCKS[data.judged] + byWall(measured) : "predicted";
  const long = (row) => `${time(stepOf(row))} (${how(row)})`;
  const told = [`The chosen placement, ${chosen.name}, takes ${long(chosen)}`];
  if (single && single !== chosen)
    told.push(`the best single device, ${single.name.replace(/^single /, "")}, ${long(single)}`);
  if (data.lower_bound_s)
    told.push(`and no placement can take less than ${time(data.lower_bound_s)}, the lower bound`);
  const faster = rows.filter(
    (row) =>
      row !== chosen &&
      chosen.measured &&
      row.measured &&
      stepOf(row) < stepOf(chosen) &&
      row.speed_up != null,
  );
  const tied = faster.length
    ? ` ${faster.map((row) => row.name).join(" and ")} ${faster.length > 1 ? "are" : "is"} ahead by no more than noise, and of equals the simplest is chosen.`
    : "";
  return `${told.join("; ")}.${tied}`;
}

function candidateColumns(measured) {
  const of = (key) => (row) => (row.measured?.[key] == null ? "–" : time(row.measured[key]));
  const judged = (key) => (row) => (isApart(row) ? "–" : of(key)(row)); // by the chosen clock
  const quartiles = (row) =>
    !isApart(row) && row.measured?.low_s < row.measured?.high_s
      ? `${time(row.measured.low_s)} – ${time(row.measured.high_s)}`
      : "–";
  const clock = isCpuClock ? ", CPU clock" : "";
  const runs = [
    [CLOCKS[isCpuClock ? "cpu-clock" : "measured"], judged("step_s"), true],
    ...(isCpuClock ? [["by the wall clock", of("wall_s"), true]] : []),
    [`quartiles${clock}`, quartiles, true],
    [`shortest${clock}`, judged("min_s"), true],
    ["runs", (row) => (row.measured?.rounds == null ? "–" : count(row.measured.rounds)), true],
  ];
  return [
    ["candidate", (row) => (row.best ? el("strong", {}, `${row.name}, chosen`) : row.name)],
    ["predicted", (row) => time(row.predicted_s), true],
    ...(measured ? runs : []),
    [
      "speed-up",
      (row) => (row.speed_up == null ? "–" : `${row.speed_up.toFixed(2)}× ${row.speed_up_is}`),
      true,
    ],
    ...data.devices.flatMap((device, d) => peakColumns(device, d)),
    ...(data.candidates.some((row) => row.why) ? [["why not", (row) => row.why]] : []),
  ];
}

function peakColumns(device, d) {
  const column = (title, key) => [
    title,
    (row) => (row[key][d] == null ? "–" : bytes(row[key][d])),
    true,
  ];
  const counted = data.candidates.some((row) => row.measured_memory_bytes[d] != null);
  return [
    column(`peak on ${device.name}${counted ? ", predicted" : ""}`, "memory_bytes"),
    ...(counted ? [column(`peak on ${device.name}, measured`, "measured_memory_bytes")] : []),
  ];
}

function memorySection() {
  const memory = data.timeline.memory;
  const fullest = memory
    .map((curve, d) => [curve.peak_bytes / Math.max(curve.limit_bytes, 1), d])
    .sort((a, b) => b[0] - a[0])[0][1];
  const { peak_bytes, limit_bytes } = memory[fullest];
  const counted = data.candidates.find((row) => row.best).measured_memory_bytes;
  const ran = counted.some((peak) => peak != null);
  const measuredPeak = (d) => (counted[d] == null ? "–" : bytes(counted[d]));
  const charts = data.devices.map((_, d) =>
    el(
      "figure",
      {},
      el(
        "figcaption",
        {},
        deviceLabel(d),
        el(
          "span",
          { class: "soft" },
          `peak ${bytes(memory[d].peak_bytes)} of ${bytes(memory[d].limit_bytes)}, ${share(memory[d].peak_bytes, memory[d].limit_bytes)}${ran ? ` predicted; ${counted[d] == null ? "not" : bytes(counted[d])} measured` : ""}`,
        ),
      ),
      el("div", { class: "chart" }),
    ),
  );
  section(
    "memory",
    "Memory over time",
    el(
      "p",
      {},
      `${deviceName(fullest)} comes closest to its limit: ${bytes(peak_bytes)} of ${bytes(limit_bytes)}, ${share(peak_bytes, limit_bytes)}. Parameters, gradients and optimizer state stay; activations and copies come and go.`,
    ),
    ran
      ? el(
          "p",
          { class: "hint" },
          "The curves are simulated. Measured is what was held when it ran: on GPUs what tensors take, on cores what a worker's process grew by, with what libraries keep.",
        )
      : "",
    el("div", { class: "grid" }, ...charts),
    numbers(
      "The numbers",
      [
        ["device", (d) => deviceLabel(d)],
        ["kind", (d) => data.devices[d].kind],
        [`peak${ran ? ", predicted" : ""}`, (d) => bytes(memory[d].peak_bytes), true],
        ...(ran ? [["peak, measured", measuredPeak, true]] : []),
        ["limit", (d) => bytes(memory[d].limit_bytes), true],
        ["share", (d) => share(memory[d].peak_bytes, memory[d].limit_bytes), true],
        ["at the beginning", (d) => bytes(memory[d].bytes[0]), true],
      ],
      () => data.devices.map((_, d) => d),
    ),
  );
  charts.forEach((figure, d) => memoryChart(figure.lastChild, d));
}

function searchSection() {
  const lines = data.search.lines;
  const made = data.made_by;
  const by = [
    made.placer && `The placement: ${made.placer}`,
    made.budget && `budget ${made.budget}`,
    made.seed != null && `seed ${made.seed}`,
    made.version && `placer ${made.version}`,
  ]
    .filter(Boolean)
    .join(", ");
  if (!lines.length) {
    section(
      "search",
      "How the search went",
      el(
        "p",
        {},
        `${by ? `${by}. ` : ""}How the search went is known right after it only: placer optimize --report writes it.`,
      ),
    );
    return;
  }
  const best = lines.reduce((a, b) => (b.cost_s.at(-1) < a.cost_s.at(-1) ? b : a));
  const byCount = el("div", { class: "chart" });
  const bySeconds = el("div", { class: "chart" });
  section(
    "search",
    "How the search went",
    data.objective === "throughput"
      ? el(
          "p",
          { class: "hint" },
          `The search makes the step of all ${data.micro_batches} micro-batches short, which the time of a further one follows.`,
        )
      : "",
    el(
      "p",
      {},
      `${by}. The search took ${time(data.search.seconds)} and ${plural(Math.max(...lines.map((line) => line.evaluations.at(-1))), "evaluation")}; the best plan, ${time(best.cost_s.at(-1))} simulated, came from ${best.name} after ${plural(best.evaluations.at(-2), "evaluation")}, ${time(best.seconds.at(-2))}.`,
    ),
    searchLegend(),
    el("div", { class: "grid" }, byCount, bySeconds),
    numbers(
      "The numbers",
      [
        ["part", ([line]) => line.name],
        ["evaluations", ([line, k]) => count(line.evaluations[k]), true],
        ["after", ([line, k]) => time(line.seconds[k]), true],
        ["best so far", ([line, k]) => time(line.cost_s[k]), true],
      ],
      () => lines.flatMap((line) => line.cost_s.map((_, k) => [line, k])),
    ),
  );
  searchChart(byCount, "evaluations", null, "evaluations");
  searchChart(bySeconds, "seconds", TIMES, "time");
}

function nextSection() {
  const sources = Object.entries(data.cost_source).map(
    ([kind, source]) => `Op costs on ${kind === "*" ? "any device" : kind}: ${source}.`,
  );
  section(
    "next",
    "What to do next",
    ...(data.commands.length
      ? data.commands.map(({ what, command }) =>
          el(
            "div",
            { class: "command" },
            el("p", {}, what),
            el(
              "div",
              {},
              el("code", {}, command),
              button("Copy", (event) => copy(command, event.target), `copy: ${what}`),
            ),
          ),
        )
      : [el("p", {}, "Save the placement and see placer export --help.")]),
    data.commands.some(({ command }) => command.includes(" export "))
      ? el(
          "p",
          { class: "hint" },
          "Other runtimes place whole modules, layers or stages: where one cannot run this placement, the export says which module is in the way.",
        )
      : "",
    ...(sources.length ? [el("p", { class: "hint" }, sources.join(" "))] : []),
  );
}

function copy(content, pressed) {
  const done = () => {
    pressed.textContent = "Copied";
    setTimeout(() => (pressed.textContent = "Copy"), 1500);
  };
  const selected = () => getSelection().selectAllChildren(pressed.previousSibling); // no clipboard for files
  if (navigator.clipboard) navigator.clipboard.writeText(content).then(done, selected);
  else selected();
}

opening();
wonSection();
graphSection();
ganttSection();
memorySection();
searchSection();
nextSection();
