// Canvases that are sharp, as wide as their hosts, and follow the theme.

// A canvas as wide as its host, sharp on every screen, drawn anew when size or theme change.
function surface(host, height, label, draw) {
  const canvas = el("canvas", { tabindex: "0", role: "application", "aria-label": label });
  host.append(canvas);
  const view = { canvas, width: 0, height, context: canvas.getContext("2d"), redraw };
  let waiting = false;
  function paint() {
    waiting = false;
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${view.height}px`;
    view.width = host.clientWidth;
    if (!view.width) return;
    canvas.width = Math.round(view.width * ratio);
    canvas.height = Math.round(view.height * ratio);
    view.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    view.context.clearRect(0, 0, view.width, view.height);
    draw(view, theme());
  }
  function redraw() {
    if (!waiting) requestAnimationFrame(paint);
    waiting = true;
  }
  watch(host, redraw);
  return view;
}

// Calls now and whenever the width of an element or the theme changes.
function watch(host, draw) {
  let width = -1;
  new ResizeObserver(() => {
    if (host.clientWidth !== width) draw();
    width = host.clientWidth;
  }).observe(host);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

const SHORTEST = 5; // a label with less than so many characters tells nothing

// As much of a label as fits: the last modules and what the op does, then that alone, cut in its middle.
function fitted(context, label, width) {
  const fits = (part) => context.measureText(part).width <= width;
  if (fits(label)) return label;
  const [path, kind] = label.includes(" · ") ? label.split(" · ") : [label, ""];
  const parts = path.split(".");
  for (let from = 1; from < parts.length; from++) {
    const rest = `…${parts.slice(from).join(".")}${kind && ` · ${kind}`}`;
    if (fits(rest)) return rest.length < SHORTEST ? "" : rest;
  }
  const last = kind || parts.at(-1);
  for (let kept = last.length; kept >= SHORTEST - 1; kept--) {
    const begin = Math.ceil(kept / 2);
    const cut =
      kept === last.length ? last : `${last.slice(0, begin)}…${last.slice(begin - kept)}`;
    if (fits(cut)) return cut;
  }
  return "";
}

// A name of an op or module that may be broken between its parts.
function breakable(name) {
  const parts = name.split(/(?<=[.:/@_])/);
  return el("span", {}, ...parts.flatMap((part, k) => (k ? [el("wbr"), part] : [part])));
}
