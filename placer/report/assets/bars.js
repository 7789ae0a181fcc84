// Bar chart of candidates: predicted and measured step times, spread and lower bound.

const ROW = 40;
const NAMES = 190;
const VALUES = 210;
const TWO_CLOCKS = 85; // extra width if wall times are shown beside CPU-clock times
const NARROWEST = 640; // the chart scrolls on narrower pages
const BEYOND = 5; // times the chosen step time: longer bars are cut

const UNPLACED = "unplaced";

const stepOf = (row) => row.measured?.step_s ?? row.predicted_s;

// Predicted speed-ups are in brackets if others were measured.
const wasMeasured = data.candidates.some((row) => row.measured);
const inBrackets = (row) => wasMeasured && row.speed_up_is === "predicted";
const speedUp = (row) =>
  inBrackets(row) ? `(${row.speed_up.toFixed(2)}×)` : `${row.speed_up.toFixed(2)}×`;

// On a busy machine CPU-clock times count; rows without them get no bar.
const isCpuClock = data.judged === "cpu-clock";
const isApart = (row) => isCpuClock && row.name === UNPLACED;
const CLOCKS = { measured: "measured", "cpu-clock": "CPU-clock time", predicted: "predicted" };
const values = () => VALUES + (isCpuClock ? TWO_CLOCKS : 0);

// The chosen candidate first, then measured ones, then predicted ones.
function sortedCandidates() {
  const known = (row) => stepOf(row) ?? Infinity;
  const rank = (row) => (row.best ? 0 : isApart(row) ? 3 : row.measured ? 1 : 2);
  return [...data.candidates].sort((a, b) => rank(a) - rank(b) || known(a) - known(b));
}

function candidateBars(host) {
  const rows = sortedCandidates();
  const bound = data.lower_bound_s;
  const best = rows.find((row) => row.best);
  const limit = BEYOND * (stepOf(best) ?? bound ?? 1);
  const shown = rows
    .filter((row) => !isApart(row))
    .flatMap((row) => [row.predicted_s, row.measured?.high_s ?? row.measured?.step_s])
    .filter((s) => s != null && s <= limit);
  const most = Math.max(...shown, bound ?? 0) * 1.04 || 1;
  watch(host, () => {
    const width = Math.max(host.clientWidth, NARROWEST);
    const chart = width - NAMES - values();
    const x = (seconds) => NAMES + (Math.min(seconds, most) / most) * chart;
    const apart = rows.filter(isApart).length; // these rows are last
    const axis = 58 + (rows.length - apart) * ROW;
    const height = axis + apart * ROW;
    const drawn = svg("svg", {
      width,
      height,
      role: "img",
      "aria-label": `Steps of ${rows.length} candidates; the numbers are in the table below`,
    });
    drawAxis(drawn, x, most, axis);
    rows.forEach((row, at) =>
      drawCandidate(drawn, row, (isApart(row) ? 58 : 40) + at * ROW, x, most, width),
    );
    if (bound) {
      const end = x(bound) > NAMES + chart / 2;
      drawn.append(
        svg("line", { class: "bound", x1: x(bound), x2: x(bound), y1: 17, y2: axis - 18 }),
        text(
          x(bound) + (end ? -6 : 6),
          14,
          `lower bound ${time(bound)}`,
          "bound-name",
          end ? "end" : "start",
        ),
      );
    }
    host.replaceChildren(drawn);
  });
}

function drawAxis(drawn, x, most, height) {
  const axis = inUnit(most, TIMES);
  for (const at of ticks(0, most, 6)) {
    drawn.append(svg("line", { class: "grid", x1: x(at), x2: x(at), y1: 34, y2: height - 20 }));
    drawn.append(text(x(at), height - 6, at ? axis.tell(at) : `0 ${axis.unit}`, "tick", "middle"));
  }
}

function drawCandidate(drawn, row, top, x, most, width) {
  const group = svg("g", { class: row.best ? "candidate chosen" : "candidate" });
  if (row.best)
    group.append(svg("rect", { class: "mark", x: 0, y: top - 4, width, height: ROW, rx: 4 }));
  group.append(
    text(10, top + (row.best ? 13 : 20), shortened(row.name, 25), "name", "start", row.name),
  );
  if (row.best) group.append(text(10, top + 29, "chosen", "tag"));
  if (isApart(row) && row.measured) {
    group.append(text(NAMES, top + 20, `${time(row.measured.wall_s)} ${comparedWith()}`, "value less"));
    drawn.append(group);
    return;
  }
  const thick = row.measured ? 11 : 14;
  if (row.predicted_s != null) {
    const y = row.measured ? top + 3 : top + 9;
    group.append(
      svg("rect", {
        class: "predicted",
        x: x(0),
        y,
        width: x(row.predicted_s) - x(0),
        height: thick,
        rx: 2,
      }),
    );
    if (row.predicted_s > most)
      group.append(text(x(most) - 4, y + thick - 2, "»", "beyond", "end"));
  }
  if (row.measured)
    drawMeasured(group, row, row.predicted_s == null ? top + 10 : top + 17, x, most);
  group.append(...toldValues(row, top + 20, width));
  drawn.append(group);
}

function drawMeasured(group, row, y, x, most) {
  const { step_s, low_s, high_s } = row.measured;
  group.append(
    svg("rect", { class: "measured", x: x(0), y, width: x(step_s) - x(0), height: 11, rx: 2 }),
  );
  if (step_s > most) {
    group.append(text(x(most) - 4, y + 9, "»", "beyond", "end"));
    return;
  }
  if (low_s == null) return; // placement files hold few quartiles
  const middle = y + 5.5;
  group.append(
    svg("path", {
      class: "whisker",
      d: `M${x(low_s)} ${middle}H${x(high_s)}M${x(low_s)} ${y + 1}v9M${x(high_s)} ${y + 1}v9`,
    }),
  );
}

// The wall time to show beside a CPU-clock time, if known.
const byWall = ({ wall_s }) =>
  isCpuClock && wall_s != null ? `; ${time(wall_s)} by the wall clock` : "";

// The note on the unplaced step, which on a busy machine has only a wall time and no bar.
const comparedWith = () =>
  `by the wall clock${data.wall_s == null ? "" : `, to be compared with ${time(data.wall_s)}`}`;

function clocksOf({ step_s, wall_s }) {
  if (!isCpuClock) return `${time(step_s)} measured`;
  return `${time(step_s)} CPU clock${wall_s == null ? "" : `, ${time(wall_s)} wall`}`;
}

function toldValues(row, y, width) {
  if (row.why && !row.measured) {
    const begin = row.predicted_s == null ? NAMES + 8 : width - values() + 14; // no bar there
    const most = row.predicted_s == null ? Math.min(120, Math.floor((width - begin) / 7)) : 24;
    return [text(begin, y, shortened(row.why, most), "value less", "start", row.why)];
  }
  const both = row.measured && row.predicted_s != null;
  const left = width - values() + 14;
  const found = [];
  if (row.predicted_s != null)
    found.push(
      text(
        left,
        both ? y - 7 : y,
        `${time(row.predicted_s)} predicted`,
        both ? "value less" : "value",
      ),
    );
  if (row.measured)
    found.push(text(left, both ? y + 9 : y, clocksOf(row.measured), "value"));
  if (!found.length) found.push(text(left, y, "unknown", "value"));
  if (row.speed_up != null)
    found.push(text(width - 8, y, speedUp(row), "value", "end"));
  return found;
}

const shortened = (name, most) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);

function text(x, y, content, kind, anchor = "start", title = "") {
  const made = svg("text", { x, y, class: kind, "text-anchor": anchor });
  made.textContent = content;
  if (title && title !== content) {
    const whole = svg("title");
    whole.textContent = title;
    made.append(whole);
  }
  return made;
}
