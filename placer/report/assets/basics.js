// Shared by all sections: data, elements and tables.

const data = JSON.parse(document.getElementById("data").textContent);

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null)); // strings become text, never markup
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Columns are [title, function from row to cell, is numeric]; rows are created when first shown.
function table(columns, rows) {
  const head = el(
    "tr",
    {},
    ...columns.map(([title, , number]) =>
      el("th", { scope: "col", class: number ? "number" : null }, title),
    ),
  );
  const body = el("tbody", {});
  for (const row of rows) {
    body.append(
      el(
        "tr",
        {},
        ...columns.map(([, cell, number]) =>
          el("td", { class: number ? "number" : null }, cell(row) ?? "–"),
        ),
      ),
    );
  }
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" },
    el("table", {}, el("thead", {}, head), body),
  );
}

function numbers(title, columns, rows) {
  const made = el("details", { class: "numbers" }, el("summary", {}, title));
  made.addEventListener(
    "toggle",
    () => made.open && made.childElementCount === 1 && made.append(table(columns, rows())),
    { once: true },
  );
  return made;
}

function section(id, title, ...children) {
  const made = el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    ...children,
  );
  document.getElementById("report").append(made);
  return made;
}

const button = (text, press, label) =>
  el("button", { type: "button", onclick: press, "aria-label": label }, text);
