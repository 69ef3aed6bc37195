// Elements out of numbers. All text goes in as text: names and owners are what clients say of themselves.

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name === "width") node.style.width = value;
    else if (name === "left") node.style.left = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined).map(stringOrNode));
  return node;
}

function stringOrNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

function svg(tag, props = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...children.map(stringOrNode));
  return node;
}

// A figure that tests and people read: the number itself stands beside its text.
export function figure(name, value, text, tag = "span", props = {}) {
  return el(tag, { ...props, "data-name": name, "data-value": value }, text);
}

export const count = (number) => Math.round(number).toLocaleString("en-US");
export const percent = (share) => `${(100 * share).toFixed(1)}%`;

export function size(nbytes) {
  const units = ["TiB", "GiB", "MiB", "KiB"];
  for (let i = 0; i < units.length; i++) {
    const unit = 1024 ** (units.length - i);
    if (nbytes >= unit) return `${(nbytes / unit).toFixed(1)} ${units[i]}`;
  }
  return `${Math.round(nbytes)} B`;
}

export function age(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= length) return `${(seconds / length).toFixed(1)} ${unit}`;
  }
  return `${Math.round(Math.max(0, seconds))} s`;
}

export function time(seconds) {
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  return seconds < 1 ? `${+(seconds * 1000).toPrecision(3)} ms` : `${+seconds.toPrecision(3)} s`;
}

// Parts of a whole, each [class, amount, what it is]; `mark` is where a line stands, as a share of the whole.
export function bar(parts, whole, { kind = "", mark = null } = {}) {
  const text = parts.map(([, amount, what]) => `${what} ${percent(whole ? amount / whole : 0)}`).join(", ");
  const node = el("div", { class: `bar ${kind}`, role: "img", "aria-label": text, title: text });
  for (const [name, amount] of parts) {
    if (amount > 0 && whole > 0) node.append(el("i", { class: name, width: `${Math.min(100, (100 * amount) / whole)}%` }));
  }
  if (mark !== null) node.append(el("span", { class: "ceiling", left: `calc(${100 * mark}% - 1px)` }));
  return node;
}

export function legend(parts) {
  const node = el("p", { class: "legend" });
  for (const [name, what] of parts) node.append(el("span", {}, name ? el("i", { class: name }) : null, what));
  return node;
}

export function table(caption, heads, rows) {
  const head = el("tr", {}, ...heads.map(([text, name]) => el("th", { scope: "col", class: name }, text)));
  const body = rows.map((cells) =>
    el("tr", {}, ...cells.map((cell, i) => (cell instanceof HTMLTableCellElement ? cell : el("td", { class: heads[i][1] }, cell)))),
  );
  return el("table", { "aria-label": caption }, el("thead", {}, head), el("tbody", {}, ...body));
}

// Values over time, between 0 and `top`; null where nothing is known.
export function spark(what, values, top) {
  const points = values.map((value, i) => [(100 * i) / Math.max(1, values.length - 1), value === null ? null : 20 - (18 * Math.min(value, top)) / (top || 1)]);
  let path = "";
  let open = false;
  for (const [x, y] of points) {
    if (y !== null) path += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    open = y !== null;
  }
  const known = points.filter(([, y]) => y !== null);
  const node = svg("svg", { class: "spark", viewBox: "0 0 100 21", preserveAspectRatio: "none", role: "img", "aria-label": what }, svg("title", {}, what));
  if (known.length > 1) {
    const area = known.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
    node.append(svg("path", { class: "area", d: `M${known[0][0]} 21L${area}L${known.at(-1)[0]} 21Z` }), svg("path", { d: path }));
  }
  return node;
}

// Bytes a second between tiers: the wider, the more.
const PLACES = { gpu: [20, 20], cpu: [185, 20], nvme: [350, 20], peer: [185, 112] };
const BOX = [90, 34];

export function flows(rates, tiers) {
  const there = Object.keys(PLACES).filter((tier) => tier === "cpu" || tiers.includes(tier) || Object.keys(rates).some((way) => way.includes(tier) && rates[way] > 0));
  const says = Object.entries(rates).filter(([, rate]) => rate > 0).map(([way, rate]) => `${way.replace(">", " to ")} ${size(rate)}/s`);
  const text = says.length ? says.join(", ") : "nothing moves between tiers";
  const tall = there.includes("peer") ? 150 : 62;
  const node = svg("svg", { viewBox: `0 0 460 ${tall}`, width: 460, role: "img", "aria-label": text, class: "flows" }, svg("title", {}, text));
  for (const tier of there.filter((name) => name !== "cpu")) {
    for (const [from, to] of [[tier, "cpu"], ["cpu", tier]]) node.append(...way(from, to, rates[`${from}>${to}`] || 0));
  }
  for (const tier of there) {
    const [x, y] = PLACES[tier];
    node.append(svg("rect", { class: "box", x, y, width: BOX[0], height: BOX[1], rx: 4 }), svg("text", { x: x + BOX[0] / 2, y: y + 21, "text-anchor": "middle" }, tier === "peer" ? "other hosts" : tier));
  }
  return node;
}

function way(from, to, rate) {
  const middle = (tier) => [PLACES[tier][0] + BOX[0] / 2, PLACES[tier][1] + BOX[1] / 2];
  const [[x1, y1], [x2, y2]] = [middle(from), middle(to)];
  const level = y1 === y2;
  const [sx, sy] = [Math.sign(x2 - x1), Math.sign(y2 - y1)];
  const aside = 9 * (level ? sx : -sy);
  const a = level ? [x1 + (sx * BOX[0]) / 2, y1 - aside] : [x1 + aside * 1.6, y1 + (sy * BOX[1]) / 2];
  const b = level ? [x2 - (sx * BOX[0]) / 2, y2 - aside] : [x2 + aside * 1.6, y2 - (sy * BOX[1]) / 2];
  const width = rate > 0 ? Math.min(12, 1.5 + 2 * Math.log10(1 + rate / 1e6)) : 1;
  const line = svg("path", { class: rate > 0 ? "flow" : "flow idle", "stroke-width": width.toFixed(1), d: `M${a[0]} ${a[1]}L${b[0]} ${b[1]}` });
  if (!(rate > 0)) return [line];
  const label = level
    ? { x: (a[0] + b[0]) / 2, y: sx > 0 ? a[1] - 9 : a[1] + 18, "text-anchor": "middle" }
    : { x: a[0] + (aside > 0 ? 10 : -10), y: (a[1] + b[1]) / 2 + 4, "text-anchor": aside > 0 ? "start" : "end" };
  const head = level ? `M${b[0] - 6 * sx} ${b[1] - 5}L${b[0]} ${b[1]}L${b[0] - 6 * sx} ${b[1] + 5}` : `M${b[0] - 5} ${b[1] - 6 * sy}L${b[0]} ${b[1]}L${b[0] + 5} ${b[1] - 6 * sy}`;
  return [line, svg("path", { class: "flow", "stroke-width": 1.5, d: head }), svg("text", label, `${size(rate)}/s`)];
}
