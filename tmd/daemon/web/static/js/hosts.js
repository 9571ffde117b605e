// Hosts: counts by role that filter, then the first of those that match, trouble first.

import { chip, el, state, table } from "./dom.js";
import { byName, count, grade, number } from "./format.js";

const SHOWN = 16;
const DRAINED = new Set(["draining", "drained", "leaving", "in reserve"]);

/** What needs an eye comes first: silent hosts, drains under way, grave findings, then drained ones. */
const EYES = { active: 0, standby: 0, drained: 1, "in reserve": 1, draining: 10, leaving: 10 };
const trouble = (host) => (EYES[host.role] ?? 20) + 2 * grade(host.severity);

/** Buttons that show the hosts of one role. */
export function roles(hosts, chosen) {
  const counts = new Map([["all", hosts.length]]);
  for (const host of hosts) counts.set(host.role, (counts.get(host.role) ?? 0) + 1);
  const alerting = hosts.filter((host) => host.alerts).length;
  if (alerting) counts.set("with alerts", alerting);
  if (chosen !== "all" && !counts.has(chosen)) counts.set(chosen, 0);
  return [...counts].map(([role, n]) => el("button", {
    type: "button", "data-key": role, "data-act": "role", "data-role": role,
    "aria-pressed": String(role === chosen), class: `role ${role.replaceAll(" ", "-")}`,
  }, role, " ", el("b", {}, number(n))));
}

export function matching(hosts, chosen, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return hosts.filter((host) => (chosen === "all" || host.role === chosen || (chosen === "with alerts" && host.alerts))
    && words.every((word) => host.host.toLowerCase().includes(word) || host.role.includes(word)));
}

export function hostTable(found) {
  const sorted = found.map((host) => [trouble(host), host])
    .sort(([a, one], [b, other]) => b - a || byName(one.host, other.host));
  const rows = sorted.slice(0, SHOWN).map(([, host]) => [host,
    host.host, state(host.role), host.ranks ?? 0,
    host.alerts ? chip(`${host.alerts} ${host.severity}`, host.severity) : "", action(host)]);
  const more = found.length - rows.length;
  return [table(["host", "role", "ranks", "alerts", ""], rows, (host) => host.host),
    more > 0 ? el("p", { class: "soft" }, `and ${count(more, "more host")}: filter to see them`) : null].filter(Boolean);
}

function action(host) {
  const undrain = host.drain_at || DRAINED.has(host.role);
  return el("button", {
    type: "button", class: "small", "data-act": undrain ? "undrain" : "drain", "data-host": host.host,
    "aria-label": `${undrain ? "Undrain" : "Drain"} ${host.host}`,
    title: host.drain_by ? `requested by ${host.drain_by}` : null,
  }, undrain ? "Undrain" : "Drain");
}

const RANKS = 8;

/** Ranks, those that do not train first, and standbys. */
export function rankTables(ranks, standbys) {
  const odd = (rank) => (rank.activity === "training" ? 0 : 2) + (rank.behind ? 1 : 0);
  const sorted = [...ranks].sort((a, b) => odd(b) - odd(a) || a.rank - b.rank);
  const calm = sorted.filter((rank) => !odd(rank)).length;
  return [
    el("p", { class: "soft" }, `${number(calm)} of ${count(ranks.length, "rank")} train without trouble`),
    el("div", {}, el("h3", {}, "Ranks"), table(["rank", "host", "activity"], sorted.slice(0, RANKS).map((r) => [r, r.rank, r.host,
      [state(r.activity), r.behind ? ` ${count(r.behind, "step")} behind` : "", r.detail ? ` ${r.detail}` : ""]]),
    (r) => r.rank)),
    el("div", {}, el("h3", {}, "Standbys"), table(["standby", "activity", "rehearsal"], standbys.slice(0, RANKS).map((s) => [s, s.host,
      [state(s.activity), s.shadows === undefined ? "" : ` rank ${s.shadows}`],
      s.unfit ? el("span", { class: "problem" }, s.unfit) : s.rehearsed ? chip("rehearsed", "good") : "not yet"]),
    (s) => s.worker)),
  ];
}
