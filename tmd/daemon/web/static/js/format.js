// Numbers and times for people.

export function seconds(s) {
  if (s < 0.0995) return `${Math.round(s * 1000)} ms`;
  if (s < 9.95) return `${s.toFixed(2)} s`;
  if (s < 99.5) return `${s.toFixed(1)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(1)} h`;
  return `${Math.round(s / 86400)} d`;
}

/** The time of day, with the date if it is not today's. */
export function clock(at) {
  const then = new Date(at * 1000);
  const time = then.toLocaleTimeString([], { hour12: false });
  if (then.toDateString() === new Date().toDateString()) return time;
  return `${then.toLocaleDateString([], { month: "short", day: "numeric" })}, ${time}`;
}
export const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
export const decimal = (n) => (Math.abs(n) < 1e5 ? n.toFixed(n < 100 ? 4 : 1) : n.toExponential(2));
export const number = (n) => n.toLocaleString("en");

const names = new Intl.Collator("en", { numeric: true });
export const byName = (a, b) => names.compare(a, b);

const GRADES = ["", "info", "warning", "degraded", "fatal"];
export const grade = (severity) => GRADES.indexOf(severity ?? "");
