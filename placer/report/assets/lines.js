// Line charts: memory of each device over the step, and the search trace.

const DIGIT = 7.5; // largest width of a digit in axis labels, px
const MARGIN = { left: 58, right: 16, top: 26, bottom: 30 };

// Draws the axes of a chart, `low` to `high` in y and 0 to `end` in x, or logarithmic from `begin`;
// returns the scales.
function axes(drawn, width, height, end, low, high, units, begin = 0) {
  const right = width - MARGIN.right;
  const bottom = height - MARGIN.bottom;
  const along = begin
    ? (value) => Math.log(Math.max(value, begin) / begin) / Math.log(end / begin)
    : (value) => value / (end || 1);
  const x = (value) => MARGIN.left + along(value) * (right - MARGIN.left);
  const y = (value) => bottom - ((value - low) / (high - low || 1)) * (bottom - MARGIN.top);
  const across = units.x ? inUnit(end, units.x) : { unit: "", tell: count };
  const up = inUnit(high, units.y);
  for (const at of ticks(low, high, 4)) {
    drawn.append(svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(at), y2: y(at) }));
    drawn.append(text(MARGIN.left - 8, y(at) + 4, up.tell(at), "tick", "end"));
  }
  let free = 0; // end of the previous label
  for (const at of begin ? powers(begin, end) : ticks(0, end, Math.max(2, width / 130))) {
    if (x(at) > right - 34 && !begin) continue; // space of the unit
    const told = across.tell(at);
    const long = told.length * DIGIT;
    const atEnd = x(at) + long / 2 > width;
    const left = x(at) - (atEnd ? long : long / 2);
    if (left < free) continue;
    free = left + long + DIGIT;
    drawn.append(text(x(at), height - 12, told, "tick", atEnd ? "end" : "middle"));
  }
  drawn.append(text(MARGIN.left - 8, 12, up.unit, "tick", "end"));
  return { x, y, right, bottom, across };
}

function stairs(points, x, y) {
  const [first, ...others] = points;
  return (
    `M${x(first[0]).toFixed(1)} ${y(first[1]).toFixed(1)}` +
    others.map(([at, value]) => `H${x(at).toFixed(1)}V${y(value).toFixed(1)}`).join("")
  );
}

// Powers of ten; if there are fewer than two, also 2 and 5 times them.
function powers(begin, end, factors = [1]) {
  const found = [];
  for (let at = 10 ** Math.floor(Math.log10(begin)); at <= end; at *= 10) {
    found.push(
      ...factors
        .map((factor) => factor * at)
        .filter((tick) => tick >= begin * 0.999 && tick <= end * 1.001),
    );
  }
  return found.length < 2 && factors.length === 1 ? powers(begin, end, [1, 2, 5]) : found;
}

const MEMORY_HEIGHT = 170;
const NEAR = 3; // times the peak: a limit beyond that would flatten the curve

function memoryChart(host, device) {
  const curve = data.timeline.memory[device];
  const step = data.timeline.step_ns;
  if (!curve.peak_bytes) {
    host.append(el("p", { class: "hint" }, "No op that keeps or makes anything runs here."));
    return;
  }
  const near = curve.limit_bytes <= curve.peak_bytes * NEAR;
  const high = Math.max(near ? curve.limit_bytes : curve.peak_bytes, curve.peak_bytes, 1) * 1.12;
  watch(host, () => {
    const width = host.clientWidth;
    const label = `Memory of ${deviceName(device)}: peak ${bytes(curve.peak_bytes)} of ${bytes(curve.limit_bytes)}`;
    const drawn = svg("svg", { width, height: MEMORY_HEIGHT, role: "img", "aria-label": label });
    const { x, y, right, bottom, across } = axes(drawn, width, MEMORY_HEIGHT, step / 1e9, 0, high, {
      x: TIMES,
      y: BYTES,
    });
    const points = curve.at_ns.map((at, k) => [at / 1e9, curve.bytes[k]]);
    points.push([step / 1e9, curve.bytes.at(-1)]);
    const path = stairs(points, x, y);
    drawn.append(
      svg("path", {
        class: "area",
        d: `${path}V${bottom}H${x(points[0][0])}Z`,
        fill: colourOf(device),
      }),
      svg("path", { class: "curve", d: path, stroke: colourOf(device) }),
      svg("line", {
        class: "bound",
        x1: MARGIN.left,
        x2: right,
        y1: near ? y(curve.limit_bytes) : MARGIN.top - 4,
        y2: near ? y(curve.limit_bytes) : MARGIN.top - 4,
      }),
      text(
        right,
        near ? y(curve.limit_bytes) - 5 : MARGIN.top - 9,
        `limit ${bytes(curve.limit_bytes)}${near ? "" : ", not to scale"}`,
        "bound-name",
        "end",
      ),
      text(right, MEMORY_HEIGHT - 12, across.unit, "tick", "end"),
    );
    host.replaceChildren(drawn);
  });
}

const SEARCH_HEIGHT = 262;
const FLAT = 3; // times the span of the best values: a first value beyond that would flatten them
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2"];

function searchChart(host, along, units, title) {
  const lines = data.search.lines;
  const least_along = units ? 1e-3 : 1;
  const end = Math.max(10 * least_along, ...lines.map((line) => line[along].at(-1)));
  const begin = Math.max(least_along, Math.min(...lines.map((line) => line[along][0])));
  const costs = [...new Set(lines.flatMap((line) => line.cost_s))].sort((a, b) => a - b);
  const [least, most] = [costs[0], costs.at(-1)];
  const good = costs[Math.floor(0.9 * (costs.length - 1))];
  const isCut = good > least && most - least > FLAT * (good - least);
  const top = isCut ? good : most;
  const span = top - least || least * 0.1;
  const edge = top + 0.1 * span;
  const bound = data.lower_bound_s;
  const shows = bound != null && bound > least - 2 * span; // near enough not to flatten the lines
  const low = Math.max(0, (shows ? Math.min(bound, least) : least) - 0.08 * span);
  watch(host, () => {
    const width = host.clientWidth;
    const drawn = svg("svg", {
      width,
      height: SEARCH_HEIGHT,
      role: "img",
      "aria-label": `${title}; the numbers are in the table below`,
    });
    const { x, y, right, across } = axes(
      drawn,
      width,
      SEARCH_HEIGHT - 16,
      end,
      low,
      edge,
      { x: units, y: TIMES },
      begin,
    );
    if (isCut)
      drawn.append(
        text(
          right,
          MARGIN.top - 9,
          `what is above ${time(top)} stands at the edge: up to ${time(most)}`,
          "tick",
          "end",
        ),
      );
    if (shows)
      drawn.append(
        svg("line", { class: "bound", x1: MARGIN.left, x2: right, y1: y(bound), y2: y(bound) }),
        text(MARGIN.left + 6, y(bound) - 5, `lower bound ${time(bound)}`, "bound-name"),
      );
    lines.forEach((line, number) => {
      const points = line.cost_s.map((cost, k) => [line[along][k], Math.min(cost, edge)]);
      drawn.append(
        svg("path", {
          class: "curve after-end",
          d: `M${x(points.at(-1)[0])} ${y(points.at(-1)[1])}H${right}`,
          stroke: colourOf(number),
        }),
      );
      drawn.append(
        svg("path", {
          class: "curve",
          d: stairs(points, x, y),
          stroke: colourOf(number),
          "stroke-dasharray": DASHES[number % DASHES.length],
        }),
      );
      for (const [at, cost] of points.length < 40
        ? points.slice(0, -1)
        : [points[0], points.at(-2)])
        drawn.append(svg("circle", { cx: x(at), cy: y(cost), r: 2.5, fill: colourOf(number) }));
    });
    drawn.append(
      text(
        right,
        SEARCH_HEIGHT - 6,
        `${title}${across.unit ? ` in ${across.unit}` : ""}, by powers of ten`,
        "tick",
        "end",
      ),
    );
    host.replaceChildren(drawn);
  });
}

const searchLegend = () =>
  legend(
    ...data.search.lines.map((line, number) => {
      const stroke = svg(
        "svg",
        { width: 34, height: 10, "aria-hidden": "true" },
        svg("line", {
          x1: 0,
          x2: 34,
          y1: 5,
          y2: 5,
          stroke: colourOf(number),
          "stroke-width": 2,
          "stroke-dasharray": DASHES[number % DASHES.length],
        }),
      );
      return el("span", { class: "device" }, stroke, line.name);
    }),
  );
