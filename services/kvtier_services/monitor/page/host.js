// What is shown of one host: each part is a title and what is under it, or null where there is nothing to say.

import { age, bar, count, el, figure, flows, legend, percent, size, spark, table, time } from "./draw.js";

const TIERS = ["gpu", "cpu", "nvme", "peer"];
const sum = (named) => Object.values(named || {}).reduce((total, one) => total + one, 0);
const some = (named) => Object.entries(named || {}).filter(([, number]) => number > 0);

export function asked(hierarchy) {
  return sum(hierarchy.hits) + sum(hierarchy.misses);
}

export function ratio(hierarchy) {
  const all = asked(hierarchy);
  return all ? sum(hierarchy.hits) / all : null;
}

// `before` is the same host a moment ago, `span` the seconds between; `past` its points of the history.
export function parts(host, before, span, past) {
  const hierarchy = host.hierarchy;
  if (!hierarchy) return {};
  return {
    tiers: tiers(host, hierarchy, past),
    hits: hits(hierarchy, past),
    moves: moves(hierarchy, before?.hierarchy, span),
    reasons: reasons(hierarchy),
    times: times(hierarchy),
    held: held(hierarchy),
    hot: hot(hierarchy, host.taken),
    peers: peers(hierarchy, host.peers),
    tenants: tenants(host.remote),
    around: around(host, hierarchy),
  };
}

function tiers(host, hierarchy, past) {
  const row = (name, usage, tier) => {
    const leased = Math.min(usage.used, tier ? hierarchy.leased?.[tier] || 0 : 0);
    const pinned = Math.min(usage.used - leased, tier === "cpu" ? hierarchy.pinned_nbytes || 0 : 0);
    const key = `tier.${name}`;
    return [
      tier ? el("b", {}, name) : `  ${name}`,
      el("td", { class: "wide" }, bar(
        [["leased", leased, "leased"], ["pinned", pinned, "pinned"], ["used", usage.used - leased - pinned, "other blocks"]],
        usage.capacity,
      )),
      figure(`${key}.used`, usage.used, size(usage.used)),
      figure(`${key}.capacity`, usage.capacity, size(usage.capacity)),
      figure(`${key}.blocks`, usage.blocks, count(usage.blocks)),
      tier ? spark(`${name}, bytes used in the last 15 minutes`, past.map((point) => point?.used?.[tier] ?? null), usage.capacity) : "",
      usage.fault ? el("span", { class: "down" }, "fault") : el("span", { class: "ok" }, "ok"),
    ];
  };
  const rows = (hierarchy.tiers || []).flatMap((tier) => [
    row(tier.label, tier, tier.tier),
    ...(tier.devices || []).map((device) => row(device.device, device, null)),
  ]);
  const heads = [["tier", ""], ["", "wide"], ["used", "n"], ["of", "n"], ["blocks", "n"], ["15 min", ""], ["state", ""]];
  const arena = host.arena;
  const grows = arena && arena.ready < arena.capacity && !arena.fault ? el("p", { class: "none" }, `cpu is growing: ${size(arena.ready)} of ${size(arena.capacity)} so far`) : null;
  return ["Tiers", [table("Tiers", heads, rows), legend([["leased", "leased"], ["pinned", "pinned"], ["used", "other blocks"]]), grows]];
}

function hits(hierarchy, past) {
  const window = hierarchy.window;
  const all = asked(hierarchy);
  const found = [];
  if (window && window.asked > 0) {
    const given = TIERS.map((tier) => [tier, window.hits?.[tier] || 0, tier]);
    const ceiling = window.ceiling || 0;
    found.push(
      bar([...given, ["miss", window.asked - sum(window.hits), "missed"]], window.asked, { kind: "hits", mark: ceiling }),
      el("p", {}, "Last hour: ", figure("window.ratio", sum(window.hits) / window.asked, percent(sum(window.hits) / window.asked), "b"),
        " of ", figure("window.asked", window.asked, count(window.asked)), " blocks asked for; at best ",
        figure("window.ceiling", ceiling, percent(ceiling), "b"), ", as ", figure("window.distinct", window.distinct, count(window.distinct)), " were different ones"),
      legend([...TIERS.filter((tier) => hierarchy.hits?.[tier] || window.hits?.[tier]).map((tier) => [tier, tier]), ["miss", "missed"], ["", "│ the most that any cache could have"]]),
    );
  }
  const rows = TIERS.filter((tier) => tier in (hierarchy.hits || {})).map((tier) => [
    tier, figure(`hits.${tier}`, hierarchy.hits[tier], count(hierarchy.hits[tier])), all ? percent(hierarchy.hits[tier] / all) : "-",
    count(hierarchy.tokens?.[tier] || 0),
  ]);
  const missed = sum(hierarchy.misses);
  rows.push(["missed", figure("misses", missed, count(missed)), all ? percent(missed / all) : "-", ""]);
  rows.push(["asked", figure("asked", all, count(all)), "", ""]);
  const ratios = past.map((point, i) => {
    const last = past[i - 1];
    const fresh = point && last ? point.asked - last.asked : 0;
    return fresh > 0 && point.hits >= last.hits ? (point.hits - last.hits) / fresh : null;
  });
  found.push(table("Hits since the start", [["since the start", ""], ["blocks", "n"], ["share", "n"], ["tokens", "n"]], rows));
  found.push(el("div", { class: "legend" }, "hit ratio, 15 min ", spark("Hit ratio in the last 15 minutes", ratios, 1)));
  return ["Hits", found];
}

function moves(hierarchy, before, span) {
  const rates = {};
  for (const [way, nbytes] of Object.entries(hierarchy.moved_nbytes || {})) {
    const fresh = before && span > 0 ? nbytes - (before.moved_nbytes?.[way] || 0) : 0;
    if (fresh > 0) rates[way] = fresh / span;
  }
  const moved = some(hierarchy.moves).map(([way, blocks]) => [
    way.replace(">", " → "), figure(`moves.${way}`, blocks, count(blocks)), figure(`moved.${way}`, hierarchy.moved_nbytes?.[way] || 0, size(hierarchy.moved_nbytes?.[way] || 0)),
  ]);
  const drawn = flows(rates, (hierarchy.tiers || []).map((tier) => tier.tier).concat(hierarchy.peers ? ["peer"] : []));
  return ["Moves between tiers", [drawn, moved.length ? table("Moves since the start", [["since the start", ""], ["blocks", "n"], ["bytes", "n"]], moved) : null]];
}

function reasons(hierarchy) {
  const rows = [
    ["missed", hierarchy.misses], ["refused", hierarchy.refused], ["dropped", hierarchy.dropped],
    ["not written to NVMe", hierarchy.admission?.refused], ["fault", hierarchy.faults], ["failed checksum", hierarchy.checksum_failures], ["waiting", hierarchy.queues],
  ].flatMap(([what, named]) => some(named).map(([name, number]) => [what, name, figure(`${what}.${name}`, number, count(number))]));
  if (hierarchy.asked_again) rows.push(["evicted, asked again", "", figure("asked_again", hierarchy.asked_again, count(hierarchy.asked_again))]);
  return rows.length ? ["Misses, refusals, faults", [table("Misses, refusals and faults", [["what", ""], ["reason", "text"], ["blocks", "n"]], rows)]] : null;
}

function times(hierarchy) {
  const named = { ...hierarchy.seconds };
  for (const [way, seen] of Object.entries(hierarchy.transfers || {})) named[way.replace(">", " → ")] = seen;
  const rows = Object.entries(named).filter(([, seen]) => seen?.count).map(([what, seen]) => [what, count(seen.count), time(seen.sum / seen.count), within(seen, 0.5), within(seen, 0.99)]);
  return rows.length ? ["Times", [table("Times", [["", ""], ["number", "n"], ["mean", "n"], ["half within", "n"], ["99 % within", "n"]], rows)]] : null;
}

function within(seen, share) {
  let below = 0;
  for (let i = 0; i < (seen.bounds || []).length; i++) {
    below += seen.buckets[i];
    if (below >= share * seen.count) return time(seen.bounds[i]);
  }
  return "longer";
}

function held(hierarchy) {
  const rows = [...(hierarchy.held || [])].sort((a, b) => b.stuck - a.stuck).map((one) => [
    el("span", { class: one.stuck ? "degraded" : "" }, one.stuck ? `${one.kind}, stuck` : one.kind),
    one.owner, size(one.nbytes), one.kind === "pin" ? `${age(-one.age)} more` : age(one.age),
  ]);
  const totals = `${count(hierarchy.sessions || 0)} sessions, ${count(hierarchy.leases || 0)} leases, ${count(hierarchy.reservations || 0)} reservations, ${count(hierarchy.pins || 0)} pinned blocks`;
  return ["Leases", [el("p", { class: "none" }, totals), rows.length ? table("Held", [["what", ""], ["owner", "text"], ["bytes", "n"], ["age", "n"]], rows) : null]];
}

function hot(hierarchy, taken) {
  const rows = (hierarchy.hot || []).map((one) => [el("code", {}, one.key), count(one.tokens), size(one.nbytes), count(one.hits), (one.tiers || []).join(", "), `${age(Math.max(0, taken - one.last_access))} ago`]);
  return rows.length ? ["Hot prefixes", [table("Hot prefixes", [["last block", ""], ["tokens", "n"], ["bytes", "n"], ["hits", "n"], ["in", ""], ["last used", "n"]], rows)]] : null;
}

function peers(hierarchy, server) {
  if (!hierarchy.peers) return null;
  const rows = (hierarchy.peers.hosts || []).map((one) => [
    one.host, count(one.blocks), size(one.bytes), one.bytes_per_second ? `${size(one.bytes_per_second)}/s` : "-",
    el("td", { class: `text ${one.avoided || one.fault ? "degraded" : "ok"}` }, one.avoided ? `not asked for ${age(one.avoided)}: ${one.fault || "it failed"}` : one.fault || "ok"),
  ]);
  const lent = `lent them ${count(hierarchy.lent || 0)} blocks, ${size(hierarchy.lent_nbytes || 0)}` + (server?.door ? `, at ${server.door}` : "");
  return ["Other hosts", [el("p", { class: "none" }, lent), rows.length ? table("Other hosts", [["host", ""], ["blocks", "n"], ["bytes", "n"], ["pace", "n"], ["state", "text"]], rows) : null]];
}

function tenants(remote) {
  if (!remote) return null;
  const rows = (remote.tenants || []).map((one) => [
    one.tenant, count(one.sessions), size(one.nbytes?.cpu || 0) + (one.quota?.cpu ? ` of ${size(one.quota.cpu)}` : ""), size(one.nbytes?.nvme || 0), size(one.pinned_nbytes || 0),
    el("td", { class: "text" }, some(one.refused).map(([what, number]) => `${what} ${count(number)}`).join(", ") || "-"),
  ]);
  const where = `at ${remote.address}, ${remote.tls ? "TLS" : "plain text"}`;
  return ["Remote clients", [el("p", { class: "none" }, where), rows.length ? table("Tenants", [["tenant", ""], ["sessions", "n"], ["cpu", "n"], ["nvme", "n"], ["pinned", "n"], ["over quota", "text"]], rows) : null]];
}

function around(host, hierarchy) {
  const index = hierarchy.index || {};
  const rows = [
    ["index", el("td", { class: `text ${index.ok ? "ok" : "degraded"}` }, `${index.kind || ""} ${index.ok ? "ok" : index.reason || ""}`)],
    ["told", `${count(index.told || 0)} updates, ${count(index.queued || 0)} queued, ${age(index.lag || 0)} behind`],
    ["hosts known", count(index.nodes_alive || 0)],
    ["door", el("td", { class: "text" }, host.socket || "-")],
    ["process", `pid ${host.pid}, ${age(Math.max(0, host.taken - host.started))} old`],
    ["metrics", el("td", { class: "text" }, host.metrics?.url || host.metrics?.fault || "-")],
  ];
  if (hierarchy.events) rows.push(["events", el("td", { class: "text" }, hierarchy.events.fault || `${hierarchy.events.endpoint}, ${count(hierarchy.events.blocks)} blocks told`)]);
  return ["Index and process", [table("Index and process", [["", ""], ["", ""]], rows)]];
}
