// The operator's page: the verifier's own metrics, read every two seconds and drawn. It only reads.

import { Figure } from "./figure.js";

const SECONDS = 2;
const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

// The text of /metrics as Map: name -> [{ labels, value }].
export function parse(page) {
  const found = new Map();
  for (const line of page.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries(
      [...(match[2] ?? "").matchAll(/(\w+)="((?:\\.|[^"])*)"/g)].map(([, name, value]) => [
        name,
        value,
      ]),
    );
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

// What a metric is now, and how much it has grown since the last reading.
class Reading {
  constructor(now, before) {
    this.now = now;
    this.before = before;
  }
  #sum(metrics, name, labels) {
    const fits = (one) => Object.entries(labels).every(([key, value]) => one.labels[key] === value);
    return (metrics?.get(name) ?? []).filter(fits).reduce((sum, one) => sum + one.value, 0);
  }
  has(name) {
    return this.now.has(name);
  }
  value(name, labels = {}) {
    return this.#sum(this.now, name, labels);
  }
  grown(name, labels = {}) {
    return this.before
      ? Math.max(0, this.value(name, labels) - this.#sum(this.before, name, labels))
      : 0;
  }
  rate(name, labels) {
    return this.grown(name, labels) / SECONDS;
  }
  share(part, whole) {
    const all = this.grown(whole);
    return all ? this.grown(part) / all : null;
  }
  labels(name, label) {
    return [...new Set((this.now.get(name) ?? []).map((one) => one.labels[label]))].sort();
  }

  // A quantile of what a histogram took in since the last reading, in its own unit.
  quantile(name, q, labels = {}) {
    const edges = this.labels(`${name}_bucket`, "le")
      .map(Number)
      .sort((a, b) => a - b);
    const counts = edges.map((le) => this.grown(`${name}_bucket`, { ...labels, le: write(le) }));
    const all = counts.at(-1);
    if (!all) return null;
    const at = counts.findIndex((count) => count >= q * all);
    return edges[at] === Infinity ? edges[at - 1] : edges[at];
  }
}

// An edge of a histogram as the metrics write it.
function write(le) {
  if (le === Infinity) return "+Inf";
  return Number.isInteger(le) ? le.toFixed(1) : String(le);
}

const count = (n) => n.toLocaleString("en", { maximumFractionDigits: 1 });
const ms = (s) => `≤ ${count(1000 * s)} ms`;
const percent = (share) => `${(100 * share).toFixed(0)} %`;
const perSecond = (n) => `${count(n)}/s`;
const kilobytes = (n) => `${count(n / 1000)} kB/s`;

const gigabytes = (n) => `${count(n / 1e9)} GB`;

const GROUPS = {
  Sessions: {
    Live: [count, (r) => r.value("moa_sessions", { state: "live" })],
    Detached: [count, (r) => r.value("moa_sessions", { state: "detached" })],
    Cold: [count, (r) => r.value("moa_sessions", { state: "cold" })],
    Connections: [count, (r) => r.value("moa_connections")],
    "Free slots": [count, (r) => r.value("moa_slots_free")],
    "KV cache in use": [
      percent,
      (r) =>
        r.value("moa_kv_pages") ? 1 - r.value("moa_kv_pages_free") / r.value("moa_kv_pages") : null,
    ],
    Memory: [
      gigabytes,
      (r) =>
        r.has("process_resident_memory_bytes") ? r.value("process_resident_memory_bytes") : null,
    ],
    "Answers of the API": [count, (r) => r.value("moa_api_running_answers")],
    "Of these wait for room": [count, (r) => r.value("moa_api_waiting_answers")],
  },
  Load: {
    "Waiting rounds": [count, (r) => r.value("moa_queued_rounds")],
    Forwards: [perSecond, (r) => r.rate("moa_forward_seconds_count")],
    "Rows in a forward": [
      count,
      (r) =>
        r.grown("moa_batch_rows_count")
          ? r.grown("moa_batch_rows_sum") / r.grown("moa_batch_rows_count")
          : null,
    ],
    Tokens: [perSecond, (r) => r.rate("moa_emitted_tokens_total")],
    "Prompt tokens": [perSecond, (r) => r.rate("moa_prompt_tokens_total")],
    Sent: [kilobytes, (r) => r.rate("moa_sent_bytes_total")],
  },
  Latency: {
    "Verify, p50": [ms, (r) => r.quantile("moa_verify_seconds", 0.5)],
    "Verify, p99": [ms, (r) => r.quantile("moa_verify_seconds", 0.99)],
    "Queue, p50": [ms, (r) => r.quantile("moa_queue_seconds", 0.5)],
    "Queue, p99": [ms, (r) => r.quantile("moa_queue_seconds", 0.99)],
    "Forward, p50": [ms, (r) => r.quantile("moa_forward_seconds", 0.5, { kind: "draft" })],
    "API's first text, p50": [ms, (r) => r.quantile("moa_api_first_text_seconds", 0.5)],
  },
  "Refused and taken away": {
    Refusals: [perSecond, (r) => r.rate("moa_refusals_total") + r.rate("moa_api_refusals_total")],
    Evictions: [perSecond, (r) => r.rate("moa_session_evictions_total")],
    Quarantined: [count, (r) => r.value("moa_quarantined_sessions_total")],
    Resumes: [perSecond, (r) => r.rate("moa_session_resumes_total")],
    "API hang-ups": [count, (r) => r.value("moa_api_hang_ups_total")],
  },
};

function group(name) {
  const heading = document.createElement("h2");
  heading.textContent = name;
  const box = document.createElement("div");
  box.className = "figures";
  $("groups").append(heading, box);
  return box;
}

const figures = Object.entries(GROUPS).flatMap(([name, members]) => {
  const box = group(name);
  return Object.entries(members).map(([title, [show, read]]) => ({
    figure: new Figure(box, title, show),
    read,
  }));
});
const heading = document.createElement("h2");
heading.textContent = "Drafts accepted, by position, since the start";
const bars = document.createElement("ul");
bars.className = "bars";
bars.tabIndex = 0;
bars.setAttribute(
  "aria-label",
  "Share of drafts whose token at this position was accepted, since the start",
);
const accepted = new Figure(group("Speculation"), "Draft tokens accepted, now", percent);
$("groups").append(heading, bars);

function drawBars(reading) {
  const drafts = reading.value("moa_spec_decode_num_drafts_total");
  const name = "moa_spec_decode_num_accepted_tokens_per_pos_total";
  const shares = reading
    .labels(name, "position")
    .map(Number)
    .sort((a, b) => a - b)
    .map((position) => (drafts ? reading.value(name, { position: String(position) }) / drafts : 0));
  // What rounds to 0 % is not drawn.
  const deepest = shares.findLastIndex((share) => share >= 0.005);
  bars.replaceChildren(
    ...shares.slice(0, deepest + 1).map((share, position) => {
      const item = document.createElement("li");
      const chart = document.createElementNS(SVG, "svg");
      chart.setAttribute("viewBox", "0 0 1 1");
      chart.setAttribute("preserveAspectRatio", "none");
      chart.setAttribute("aria-hidden", "true");
      const bar = document.createElementNS(SVG, "rect");
      for (const [key, value] of Object.entries({ x: 0, width: 1, y: 1 - share, height: share })) {
        bar.setAttribute(key, value);
      }
      chart.append(bar);
      item.append(percent(share), chart, String(position + 1));
      return item;
    }),
  );
}

// Which model this is, what it runs on, and since when.
function tell(reading) {
  const [served] = reading.now.get("moa_info") ?? [];
  if (!served) return;
  const { model, dtype, device, decoder, version, computes } = served.labels;
  const parts = [model, `${dtype} on ${device}, ${decoder}`, `version ${version}`];
  if (computes) parts.push(`computes ${computes}`);
  if (reading.has("process_start_time_seconds")) {
    parts.push(
      `running for ${lasting(Date.now() / 1000 - reading.value("process_start_time_seconds"))}`,
    );
  }
  $("served").textContent = parts.join(" · ");
}

function lasting(seconds) {
  const minutes = Math.max(0, Math.floor(seconds / 60));
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 60 * 48) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 60 / 24)} days`;
}

let before = null;
async function look() {
  const key = $("key").value;
  try {
    const response = await fetch("metrics", {
      headers: key ? { Authorization: `Bearer ${key}` } : {},
    });
    if (!response.ok) {
      throw new Error(
        { 401: "the operator's token is needed", 403: "this token is not the operator's" }[
          response.status
        ] ?? `the endpoint answered ${response.status}`,
      );
    }
    const now = parse(await response.text());
    const reading = new Reading(now, before);
    for (const { figure, read } of figures) figure.add(read(reading));
    accepted.add(
      reading.share(
        "moa_spec_decode_num_accepted_tokens_total",
        "moa_spec_decode_num_draft_tokens_total",
      ),
    );
    drawBars(reading);
    tell(reading);
    before = now;
    $("state").textContent = "running";
    $("state").className = "";
  } catch (error) {
    $("state").textContent = error.message;
    $("state").className = "error";
  }
}

$("key").value = sessionStorage.getItem("key") ?? "";
$("access").addEventListener("submit", (event) => event.preventDefault());
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  look();
});
look();
setInterval(() => {
  if (!document.hidden) look();
}, 1000 * SECONDS);
