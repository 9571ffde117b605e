// Wires the feed, the views and the keyboard. A view is drawn again when its rows have changed.

import { ask, askToken, watchActions } from "./actions.js";
import { alerts } from "./alerts.js";
import { charts } from "./charts.js";
import { byId, show } from "./dom.js";
import { Feed, KINDS } from "./feed.js";
import { byName } from "./format.js";
import { heat, watchHeat } from "./heat.js";
import { hostTable, matching, rankTables, roles } from "./hosts.js";
import { busy, lanes, marksOf } from "./lanes.js";
import { ledger } from "./ledger.js";
import { banners, jobTabs, OUTLOOKS, survival } from "./survival.js";

const chosen = { job: "", role: "all", filter: "" };
const dirty = new Set();
let drawing = false;

const feed = new Feed((kinds) => draw(kinds));

function draw(kinds) {
  kinds.forEach((kind) => dirty.add(kind));
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const now = new Set(dirty);
    dirty.clear();
    render((...any) => any.some((kind) => now.has(kind)));
  });
}

function render(changed) {
  const cluster = feed.rows.get("cluster");
  const jobs = feed.of("job").sort((a, b) => byName(a.job, b.job));
  const job = jobs.find((one) => one.job === chosen.job) ?? jobs[0];
  if (changed("link")) link();
  if (changed("cluster", "job")) head(cluster, jobs, job);
  if (changed("host")) hosts();
  const plans = job ? feed.of("plan", job.job) : [];
  if (changed("plan", "log", "alert", "job")) {
    show(byId("lanes"), lanes(plans, [...feed.of("alert"), ...feed.log], Date.now() / 1000));
  }
  if (changed("alert", "log")) show(byId("alerts"), alerts(feed.of("alert"), feed.log));
  if (changed("job")) show(byId("ledger"), job ? ledger(job) : []);
  if (changed("rank", "standby", "job")) {
    show(byId("ranks"), job ? rankTables(feed.of("rank", job.job), feed.of("standby", job.job)) : []);
  }
  if (changed("sample", "plan")) {
    const samples = (job && feed.samples.get(job.job)) ?? [];
    charts(samples, marksOf(plans));
    heat(samples, marksOf(plans), job?.ranks ?? 0);
  }
}

function link() {
  byId("link").textContent = feed.link.text;
  byId("link").className = `pill ${feed.link.kind}`;
}

function head(cluster, jobs, job) {
  const led = cluster?.leader ? `led by ${cluster.leader}` : "no leader";
  byId("cluster").textContent = cluster ? `${cluster.cluster} · ${led} · served by ${cluster.host}` : "";
  const stopped = cluster?.paused || cluster?.breaker;
  byId("pause").textContent = stopped ? "Resume" : "Pause";
  byId("pause").dataset.act = stopped ? "resume" : "pause";
  show(byId("banners"), banners(cluster));
  show(byId("jobs"), jobTabs(jobs, job?.job));
  show(byId("survival"), job ? survival(job) : []);
  byId("survival").hidden = !job;
  const words = job ? OUTLOOKS[job.survival.outlook]?.[0] : "no job";
  document.title = `${words} · ${cluster?.cluster ?? "tmd"}`;
}

function hosts() {
  const all = feed.of("host");
  show(byId("roles"), roles(all, chosen.role));
  show(byId("hosts"), hostTable(matching(all, chosen.role, chosen.filter)));
}

// --- what people do -------------------------------------------------------------------------------

const ACTS = {
  drain: (data) => ask("drain", data),
  undrain: (data) => ask("undrain", data),
  pause: () => ask("pause"),
  resume: () => ask("resume"),
  token: () => askToken(),
  help: () => byId("help").showModal(),
  close: (_, button) => button.closest("dialog").close(),
  role: ({ role }) => { chosen.role = role; draw(["host"]); },
  job: ({ job }) => { chosen.job = job; draw(KINDS); },
};

const KEYS = {
  "/": () => byId("filter").focus(),
  "?": () => byId("help").showModal(),
  p: () => byId("pause").click(),
  u: () => askToken(),
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-act]");
  if (button) ACTS[button.dataset.act](button.dataset, button);
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, dialog");
  if (event.ctrlKey || event.metaKey || event.altKey || typing) return;
  const tab = byId("jobs").children[Number(event.key) - 1];
  const act = KEYS[event.key] ?? (tab && (() => tab.click()));
  if (!act) return;
  event.preventDefault();
  act();
});

byId("filter").addEventListener("input", (event) => {
  chosen.filter = event.target.value;
  draw(["host"]);
});
// A filter is left with Escape, and empties itself as search fields do.
byId("filter").addEventListener("keydown", (event) => { if (event.key === "Escape") event.target.blur(); });

new ResizeObserver(() => draw(["sample"])).observe(byId("charts"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(["sample"]));
// A plan that is under way grows, also while nothing is heard of it.
setInterval(() => { if (busy(feed.of("plan"))) draw(["plan"]); }, 1000);
setInterval(() => feed.look(), 5000);

watchActions();
watchHeat();
feed.open();
