// Markdown to a tree of plain objects { tag, attrs, children }, which `render.js` turns into elements. No HTML is ever
// parsed: what looks like markup in the text stays text, and only the tags and attributes named here can come out.

import { highlight } from "./highlight.js";

export const TAGS = new Set(["a", "blockquote", "br", "code", "del", "details", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li",
  "math", "ol", "p", "pre", "span", "strong", "summary", "table", "tbody", "td", "th", "thead", "tr", "ul"]);
export const BORDER = "\ue000";  // stands in the text where provisional text begins
const DEEPEST = 8;
const LONGEST_FORMULA = 60;  // lines

const element = (tag, children = [], attrs = {}) => ({ tag, attrs, children });

export function parse(text) {
  const source = text.replace(/\r\n?/g, "\n");
  const thought = THOUGHT.exec(source);
  if (!thought) return blocks(source.split("\n"), 0);
  const [whole, border, inside, close, unopened] = thought;
  const summary = element("summary", [close === "" ? "Thinking …" : "Thought"]);
  return [element("details", [summary, ...blocks((border + (unopened ?? inside)).split("\n"), 1)]), ...blocks(source.slice(whole.length).split("\n"), 0)];
}

// Some templates open the thinking themselves: then its end, on a line of its own, is all that the text has.
const THOUGHT = new RegExp(`^\\s{0,8}(${BORDER}?)(?:<think>([\\s\\S]*?)(</think>|$)|([\\s\\S]*?)\\n(</think>)(?=\\n|$))`);

// ---- blocks

// No expression may take long for any text: what repeats is bounded, and nothing repeats within what repeats.
const FENCE = /^ {0,3}(`{3,}|~{3,}) {0,8}([\w+#.-]{0,40})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const BULLET = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const TASK = /^\[([ xX])\] /;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;

const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());
const divides = (line) => line.includes("|") && cells(line).every((cell) => /^:?-+:?$/.test(cell));
const headline = (text) => {
  const bare = text.trim();
  let end = bare.length;
  while (bare[end - 1] === "#") end--;
  return bare.slice(0, end).trimEnd();
};

function blocks(lines, depth) {
  const out = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let match;
    if (!line.trim()) {
      at++;
    } else if ((match = FENCE.exec(line))) {
      const close = new RegExp(`^ {0,3}${match[1][0]}{${match[1].length},}\\s*$`);
      let end = at + 1;
      while (end < lines.length && !close.test(lines[end])) end++;
      out.push(codeBlock(lines.slice(at + 1, end).join("\n"), match[2]));
      at = end + 1;
    } else if ((match = HEADING.exec(line))) {
      out.push(element(`h${match[1].length}`, inline(headline(match[2]))));
      at++;
    } else if (RULE.test(line)) {
      out.push(element("hr"));
      at++;
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      const end = span(lines, at, (next) => QUOTE.test(next));
      out.push(element("blockquote", blocks(lines.slice(at, end).map((l) => l.replace(QUOTE, "")), depth + 1)));
      at = end;
    } else if ((match = BULLET.exec(line)) && depth < DEEPEST) {
      at = list(lines, at, match, depth, out);
    } else if (line.includes("|") && divides(lines[at + 1] ?? "")) {
      const end = span(lines, at + 2, (next) => next.includes("|"));
      out.push(table(line, lines[at + 1], lines.slice(at + 2, end)));
      at = end;
    } else {
      const end = span(lines, formulaEnd(lines, at), (next) => next.trim() && !starts(next));
      out.push(element("p", inline(lines.slice(at, end).join("\n"))));
      at = end;
    }
  }
  return out;
}

const starts = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || BULLET.test(line) || FORMULA.test(line);

// A displayed formula goes on to the line that closes it, whatever its lines begin with.
function formulaEnd(lines, at) {
  const open = FORMULA.exec(lines[at]);
  const close = open?.[1] === "$$" ? "$$" : "\\]";
  for (let end = at; open && end < Math.min(lines.length, at + LONGEST_FORMULA); end++) {
    if (lines[end].includes(close, end === at ? open[0].length : 0)) return end + 1;
  }
  return at + 1;
}

function span(lines, at, goesOn) {
  while (at < lines.length && goesOn(lines[at])) at++;
  return at;
}

function list(lines, at, first, depth, out) {
  const ordered = /\d/.test(first[2]);
  const items = [];
  while (at < lines.length) {
    const match = BULLET.exec(lines[at]);
    if (!match || /\d/.test(match[2]) !== ordered) break;
    const indent = match[0].length;
    const item = [lines[at].slice(indent).replace(TASK, (_, done) => (done === " " ? "☐ " : "☑ "))];
    at++;
    while (at < lines.length && (!lines[at].trim() ? /^\s{2,}/.test(lines[at + 1] ?? "") : /^\s{2,}/.test(lines[at]) || !starts(lines[at]))) {
      item.push(lines[at].replace(new RegExp(`^ {0,${indent}}`), ""));
      at++;
    }
    const inner = blocks(item, depth + 1);
    const tight = item.every((line) => line.trim());
    items.push(element("li", tight ? inner.flatMap((node) => (node.tag === "p" ? node.children : [node])) : inner));
    while (at < lines.length && !lines[at].trim() && BULLET.test(lines[at + 1] ?? "")) at++;
  }
  const start = ordered ? Number.parseInt(first[2], 10) : 1;
  out.push(element(ordered ? "ol" : "ul", items, start !== 1 ? { start: String(start) } : {}));
  return at;
}

function table(head, divider, rows) {
  const sides = cells(divider).map((cell) => (!cell.endsWith(":") ? "" : cell.startsWith(":") ? "center" : "right"));
  const row = (line, tag) => element("tr", cells(line).map((cell, at) => element(tag, inline(cell), sides[at] ? { class: sides[at] } : {})));
  return element("table", [element("thead", [row(head, "th")]), element("tbody", rows.map((line) => row(line, "td")))], { tabindex: "0" });
}

function codeBlock(code, language) {
  const plain = /^(te?xt|plain|output|console)?$/i.test(language) || code.length > 20000;
  const pieces = plain ? [["", code]] : highlight(code);
  return element("pre", [element("code", pieces.map(([kind, text]) => (kind ? element("span", [text], { class: kind }) : text)))], language ? { tabindex: "0", "data-language": language } : { tabindex: "0" });
}

// ---- inline

// Prices are no formulas: a single dollar opens before no space, and closes after no space and before no letter or digit.
const INLINE = /(`+)|(\$\$|\\\[)((?:\\[^[(]|[^\\]){1,2000}?)(?:\$\$|\\\])|\\\(((?:\\[^[(]|[^\\]){1,1000}?)\\\)|\$(?![\s$])((?:\\.|[^\\$\n]){1,500})(?<!\s)\$(?!\w)|!?\[([^[\]\n]{0,500})\]\(([^()\s]{0,2000})(?:\s{1,4}"[^"\n]{0,500}")?\)|(\*\*|__)(?=\S)([\s\S]{0,1000}?\S)\8|(\*|_)(?=\S)([^*_]{0,1000}?\S)\10(?!\w)|~~(?=\S)([\s\S]{0,1000}?\S)~~|(https?:\/\/[^\s<>"')\]]{1,2000})|\\([\\`*_{}[\]()#+\-.!|~>$])|( {2,8}\n|\n)/g;

// Where runs of backticks of each length begin: a code span ends at the next run that is as long as its first.
function tickRuns(text) {
  const runs = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!runs.has(run.length)) runs.set(run.length, []);
    runs.get(run.length).push(index);
  }
  return runs;
}

function inline(text, depth = 0) {
  const out = [];
  const runs = tickRuns(text);
  const pattern = new RegExp(INLINE);
  let last = 0;
  let match;
  while ((match = pattern.exec(text))) {
    const [, ticks, displayed, display, inlined, dollars, label, target, strongMark, strong, emMark, em, struck, bare, escaped, newline] = match;
    let [whole] = match;
    const before = text[match.index - 1] ?? " ";
    if (emMark === "_" && /\w/.test(before)) continue;  // snake_case
    let code = "";
    if (ticks) {
      const same = runs.get(ticks.length) ?? [];
      while (same.length && same[0] <= match.index) same.shift();
      if (!same.length) continue;
      code = text.slice(match.index + ticks.length, same[0]);
      whole = text.slice(match.index, same[0] + ticks.length);
      pattern.lastIndex = match.index + whole.length;
    }
    if (match.index > last) out.push(text.slice(last, match.index));
    last = match.index + whole.length;
    const inner = (part) => (depth < DEEPEST ? inline(part, depth + 1) : [part]);
    if (ticks) out.push(element("code", [code.replace(/^ (.*) $/s, "$1")]));
    else if (displayed) out.push(element("math", [whole], { tex: display, display: "block" }));
    else if (inlined ?? dollars) out.push(element("math", [whole], { tex: inlined ?? dollars }));
    else if (target !== undefined) out.push(link(target, label ? inner(label) : [target], whole));
    else if (strongMark) out.push(element("strong", inner(strong)));
    else if (emMark) out.push(element("em", inner(em)));
    else if (struck !== undefined) out.push(element("del", inner(struck)));
    else if (bare) out.push(link(bare, [bare], whole));
    else if (escaped) out.push(escaped);
    else if (newline) out.push(element("br"));
  }
  if (last < text.length) out.push(text.slice(last));
  return out;
}

// Only addresses that cannot run anything. Pictures become links: nothing is loaded from elsewhere.
function link(target, children, whole) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return whole;
  return element("a", children, { href: target, target: "_blank", rel: "noopener noreferrer" });
}
