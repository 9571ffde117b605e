// What the daemon sends: all rows once, from then on what changes, and every alert.

const HOUR_MS = 3600e3;
/** All that can change: kinds of rows, and what is no row. */
export const KINDS = ["link", "cluster", "job", "host", "plan", "alert", "log", "sample", "rank", "standby"];
const AGAIN_MS = 3000;
/** Longer than the daemon ever sends nothing. */
const SILENT_MS = 40e3;
const LOGGED = 300;
const SAMPLES = 300;

export class Feed {
  rows = new Map();
  /** Job -> samples, oldest first. */
  samples = new Map();
  /** Alerts of the last hour as they were published, newest first. */
  log = [];
  link = { text: "connecting", kind: "" };

  /** `changed(kinds)`: the kinds of rows that changed, such as "host". */
  constructor(changed) {
    this.changed = changed;
  }

  open() {
    this.source?.close();
    this.heardAt = Date.now();
    // Cursors of the alert stream begin with milliseconds.
    const source = this.source = new EventSource(`v1/page?after=${this.heardAt - HOUR_MS}`);
    let first = true;
    const on = (kind, take) => source.addEventListener(kind, (e) => {
      if (first) this.log = [];  // all alerts of the hour follow
      first = false;
      this.heardAt = Date.now();
      take(e.data && JSON.parse(e.data));
    });
    on("quiet", () => {});
    source.addEventListener("error", () => {
      this.say("the daemon does not answer; trying again", "bad");
      // A browser gives up after a refusal, such as that of a daemon with too many streams.
      if (source.readyState === EventSource.CLOSED) setTimeout(() => this.open(), AGAIN_MS);
    });
    on("away", ({ away }) => this.say(away, "bad"));
    on("alert", (alert) => this.received(alert));
    on("whole", (whole) => {
      this.rows.clear();
      this.samples.clear();
      this.take(whole);
      this.changed(new Set(KINDS));
    });
    on("delta", (delta) => this.take(delta));
  }

  /** To be called now and then. A stream from a daemon that hangs reports no error. */
  look() {
    const now = Date.now();
    const recent = this.log.filter((alert) => alert.at * 1000 > now - HOUR_MS);
    if (recent.length < this.log.length) {
      this.log = recent;
      this.changed(new Set(["log"]));
    }
    this.followVersion();
    if (now - this.heardAt < SILENT_MS) return;
    this.say("nothing comes from the daemon; trying again", "bad");
    this.open();
  }

  /** Loads the page anew if the version has changed, whose rows these scripts may not know. */
  followVersion() {
    const changed = this.version && this.rows.get("cluster")?.version !== this.version;
    if (changed && !document.querySelector("dialog[open]")) location.reload();
  }

  say(text, kind = "") {
    this.link = { text, kind };
    this.changed(new Set(["link"]));
  }

  take({ rows, gone = [], samples }) {
    const kinds = new Set(["link"]);
    for (const key of gone) {
      this.rows.delete(key);
      kinds.add(kindOf(key));
    }
    for (const [key, row] of Object.entries(rows)) {
      // An exit is forgotten after a while; the lane keeps when it was seen.
      const before = this.rows.get(key);
      if (before?.detected_at && !row.detected_at) row.detected_at = before.detected_at;
      this.rows.set(key, row);
      kinds.add(kindOf(key));
    }
    for (const [job, fresh] of Object.entries(samples)) {
      // Later ones are from before the clock of the daemon was set back.
      const known = (this.samples.get(job) ?? []).filter((sample) => sample.at < fresh[0].at);
      this.samples.set(job, [...known, ...fresh].slice(-SAMPLES));
      kinds.add("sample");
    }
    this.version ??= this.rows.get("cluster")?.version;
    this.followVersion();
    this.link = { text: "live", kind: "good" };
    this.changed(kinds);
  }

  received(alert) {
    this.log.unshift(alert);
    this.log.length = Math.min(this.log.length, LOGGED);
    this.changed(new Set(["log"]));
  }

  /** Rows of a kind, of a job if one is given. */
  of(kind, job) {
    const start = job === undefined ? `${kind}/` : `${kind}/${job}/`;
    const found = [];
    for (const [key, row] of this.rows) if (key.startsWith(start)) found.push(row);
    return found;
  }
}

const kindOf = (key) => key.split("/", 1)[0];
