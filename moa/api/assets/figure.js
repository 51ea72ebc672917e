// A small live chart: a name, the latest value, and its last minute as a line.

const POINTS = 60;
const SVG = "http://www.w3.org/2000/svg";

export class Figure {
  constructor(parent, name, write, about = "") {
    this.values = [];
    this.write = write;
    const box = document.createElement("div");
    box.className = "figure";
    box.title = about;
    const list = document.createElement("dl");
    const term = document.createElement("dt");
    term.textContent = name;
    this.value = document.createElement("dd");
    this.value.textContent = "–";
    list.append(term, this.value);
    const chart = document.createElementNS(SVG, "svg");
    chart.setAttribute("viewBox", `0 0 ${POINTS - 1} 20`);
    chart.setAttribute("preserveAspectRatio", "none");
    chart.setAttribute("aria-hidden", "true");
    this.line = document.createElementNS(SVG, "path");
    chart.append(this.line);
    box.append(list, chart);
    parent.append(box);
  }

  add(value) {
    this.values.push(value);
    if (this.values.length > POINTS) this.values.shift();
    this.value.textContent = value === null ? "–" : this.write(value);
    this.line.setAttribute("d", lineOf(this.values));
  }
}

// The line through the values, with a gap where one is not known: that is no zero.
export function lineOf(values) {
  const most = Math.max(...values.map((value) => value ?? 0)) || 1;
  const start = POINTS - values.length;
  const parts = [];
  for (const [at, value] of values.entries()) {
    if (value === null) continue;
    const goesOn = at > 0 && values[at - 1] !== null;
    parts.push(`${goesOn ? "L" : "M"}${start + at} ${19 - (18 * value) / most}`);
  }
  return parts.join("");
}
