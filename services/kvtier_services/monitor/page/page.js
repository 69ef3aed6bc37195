// The fleet's snapshots, as they come. What is wrong was judged by the controller; nothing is judged here.

import { age, bar, count, el, figure, percent, size } from "./draw.js";
import { asked, parts, ratio } from "./host.js";

const $ = (id) => document.getElementById(id);
const KEPT = 15 * 60;
const EVERY = 5;
const RETRY = 5000;
const SILENT = 8000;
const hosts = new Map();
let points = [];
let latest = null;
let before = null;
let heard = 0;

function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

function render() {
  const snapshot = latest;
  const span = before ? snapshot.taken - before.taken : 0;
  note(snapshot);
  head(snapshot);
  totals(snapshot);
  const order = { down: 0, degraded: 1, drained: 2, ok: 3 };
  const sorted = [...snapshot.hosts].sort((a, b) => order[a.health] - order[b.health] || a.host.localeCompare(b.host));
  const was = new Map((before?.hosts || []).map((host) => [host.host, host]));
  for (const host of sorted) show({ ...host, taken: snapshot.taken }, was.get(host.host), span, snapshot);
  for (const [name, one] of hosts) {
    if (!sorted.some((host) => host.host === name)) {
      one.node.remove();
      hosts.delete(name);
    }
  }
  sorted.forEach((host, i) => {
    const node = hosts.get(host.host).node;
    if ($("hosts").children[i] !== node) $("hosts").insertBefore(node, $("hosts").children[i] || null);
  });
  $("filter-label").hidden = sorted.length < 6;
  filter();
}

function head(snapshot) {
  const counts = {};
  for (const host of snapshot.hosts) counts[host.health] = (counts[host.health] || 0) + 1;
  const several = snapshot.hosts.length > 1 ? `: ${Object.entries(counts).map(([health, number]) => `${number} ${health}`).join(", ")}` : "";
  const badge = $("health").firstElementChild;
  badge.className = `badge ${snapshot.health}`;
  badge.dataset.value = snapshot.health;
  text(badge, `fleet ${snapshot.health}${several}`);
  const redis = snapshot.redis || {};
  const said = [
    snapshot.version, snapshot.started ? `up ${age(snapshot.taken - snapshot.started)}` : "", snapshot.ray?.address ? `Ray ${snapshot.ray.address}` : "",
    redis.pid ? `${redis.version} (pid ${redis.pid})` : "", snapshot.controller ? `controller pid ${snapshot.controller.pid}` : "",
  ];
  text($("about"), said.filter(Boolean).join("  ·  "));
  const reasons = snapshot.reasons || [];
  if ($("reasons").dataset.said !== JSON.stringify(reasons)) {
    $("reasons").dataset.said = JSON.stringify(reasons);
    $("reasons").replaceChildren(...reasons.map((why) => el("li", {}, why)));
  }
  text($("taken"), `taken ${new Date(1000 * snapshot.taken).toLocaleTimeString()} on ${snapshot.here || "?"}, schema ${snapshot.schema}`);
  document.title = `${snapshot.health === "ok" ? "" : `${snapshot.health}: `}kvtier`;
}

function totals(snapshot) {
  const all = snapshot.totals || {};
  const last = all.window || {};
  const hits = Object.values(last.hits || {}).reduce((total, one) => total + one, 0);
  const one = snapshot.hosts.length === 1 ? snapshot.hosts[0].hierarchy?.window : null;
  const tokens = Object.values(all.tokens || {}).reduce((total, given) => total + given, 0);
  const shown = [
    ["hit ratio since the start", "totals.hit_ratio", all.hit_ratio, all.asked ? percent(all.hit_ratio) : "-"],
    [one?.asked ? `last hour, at best ${percent(one.ceiling)}` : "last hour", "totals.last", last.asked ? hits / last.asked : 0, last.asked ? percent(hits / last.asked) : "-"],
    ["blocks asked for", "totals.asked", all.asked, count(all.asked || 0)],
    ["tokens not computed", "totals.tokens", tokens, count(tokens)],
    ["of prefill saved", "totals.saved_seconds", all.saved_seconds, age(all.saved_seconds || 0)],
    ["hosts serve", "totals.hosts", snapshot.hosts.filter((host) => host.serving).length, `${snapshot.hosts.filter((host) => host.serving).length} of ${snapshot.hosts.length}`],
  ];
  $("figures").replaceChildren(...shown.map(([what, name, value, said]) => el("div", { class: "figure" }, figure(name, value, said, "b"), el("span", {}, what))));
}

function made(name, open) {
  const summary = el("summary");
  const body = el("div", { class: "body" });
  const why = el("ul", { class: "why" });
  const node = el("details", { class: "host", "data-host": name }, summary, why, body);
  node.open = open;
  const one = { node, summary, why, body, sections: new Map() };
  hosts.set(name, one);
  return one;
}

function show(host, was, span, snapshot) {
  const one = hosts.get(host.host) || made(host.host, snapshot.hosts.length < 4);
  one.node.dataset.health = host.health;
  const mini = el("span", { class: "mini" });
  for (const tier of host.hierarchy?.tiers || []) {
    mini.append(el("span", { class: "none" }, tier.tier), bar([["used", tier.used, `${tier.tier} used`]], tier.capacity));
  }
  const hit = host.hierarchy ? ratio(host.hierarchy) : null;
  one.summary.replaceChildren(
    el("h3", {}, host.host + (host.host === snapshot.here ? " (here)" : "")), el("span", { class: `badge ${host.health}` }, host.health), mini,
    el("span", { class: "none" }, hit === null ? "" : `${percent(hit)} of ${count(asked(host.hierarchy))} blocks`),
  );
  one.why.replaceChildren(...(host.reasons || []).map((reason) => el("li", {}, reason)));
  if (!one.node.open) return;
  const past = points.map((point) => point.hosts[host.host] || null);
  const wanted = parts(host, was, span, past);
  for (const [key, part] of Object.entries(wanted)) fill(one, key, part);
  for (const key of one.sections.keys()) if (!wanted[key]) fill(one, key, null);
}

function fill(one, key, part) {
  let section = one.sections.get(key);
  if (!part) {
    section?.remove();
    one.sections.delete(key);
    return;
  }
  if (!section) {
    section = el("div", { class: "part", "data-part": key }, el("h4", {}, part[0]), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": part[0] }));
    one.sections.set(key, section);
    one.body.append(section);
  }
  section.lastElementChild.replaceChildren(...part[1].filter(Boolean));
}

function filter() {
  const wanted = $("filter").value.trim().toLowerCase();
  for (const [name, one] of hosts) one.node.hidden = Boolean(wanted) && !`${name} ${one.node.dataset.health}`.toLowerCase().includes(wanted);
}

// History: what the controller kept, and what comes while this page is open; a clock may be set back.
function note(snapshot) {
  while (points.length && points.at(-1).taken > snapshot.taken) points.pop();
  if (points.length && snapshot.taken - points.at(-1).taken < EVERY - 0.5) return;
  const now = {};
  for (const host of snapshot.hosts) {
    const hierarchy = host.hierarchy || {};
    const hits = Object.values(hierarchy.hits || {}).reduce((total, one) => total + one, 0);
    now[host.host] = { used: Object.fromEntries((hierarchy.tiers || []).map((tier) => [tier.tier, tier.used])), hits, asked: asked(hierarchy) };
  }
  points.push({ taken: snapshot.taken, hosts: now });
  points = points.filter((point) => point.taken > snapshot.taken - KEPT);
}

async function load(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).trim()}`);
  return answer.json();
}

function take(snapshot) {
  heard = Date.now();
  $("lost").hidden = true;
  [before, latest] = [latest, snapshot];
  try {
    render();
  } catch (error) {
    lost(`this page cannot show it: ${error}`);
    throw error;
  }
}

function lost(why) {
  const since = heard ? ` since ${new Date(heard).toLocaleTimeString()} (${age((Date.now() - heard) / 1000)}); what is shown is from then` : "";
  text($("lost"), `No answer${since}${why ? `. ${why}` : ""}`);
  $("lost").hidden = false;
}

function follow() {
  const events = new EventSource("events");
  events.onmessage = (event) => take(JSON.parse(event.data));
  events.onerror = async () => {
    if (events.readyState !== EventSource.CLOSED) return;
    try {
      take(await load("snapshot.json"));
    } catch (error) {
      lost(error.message);
    }
    setTimeout(follow, RETRY);
  };
}

$("filter").addEventListener("input", filter);
$("hosts").addEventListener("toggle", () => latest && render(), true);
setInterval(() => { if (Date.now() - heard > SILENT) lost(""); }, 1000);
load("history.json").then((history) => { points = [...history.points, ...points]; }).catch(() => undefined).finally(follow);
