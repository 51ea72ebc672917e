// Markdown to a tree of plain objects { tag, attrs, children }, which `render.js` turns into
// elements. No HTML is ever parsed: what looks like markup in the text stays text, and only the
// tags and attributes named here can come out.

import { highlight } from "./highlight.js";

export const TAGS = new Set([
  "a",
  "blockquote",
  "br",
  "code",
  "del",
  "details",
  "em",
  "h1",
  "h2",
  "h3",
  "h4",
  "h5",
  "h6",
  "hr",
  "li",
  "math",
  "ol",
  "p",
  "pre",
  "span",
  "strong",
  "summary",
  "table",
  "tbody",
  "td",
  "th",
  "thead",
  "tr",
  "ul",
]);
export const BORDER = "\ue000"; // stands in the text where provisional text begins
const DEEPEST = 8;
const LONGEST_FORMULA = 60; // lines

const element = (tag, children = [], attrs = {}) => ({ tag, attrs, children });

export function parse(text) {
  const source = text.replace(/\r\n?/g, "\n");
  const thought = THOUGHT.exec(source);
  if (!thought) return blocks(source.split("\n"), 0);
  const [whole, border, inside, close, unopened] = thought;
  const summary = element("summary", [close === "" ? "Thinking …" : "Thought"]);
  return [
    element("details", [summary, ...blocks((border + (unopened ?? inside)).split("\n"), 1)]),
    ...blocks(source.slice(whole.length).split("\n"), 0),
  ];
}

// Some templates open the thinking themselves: then its end, on a line of its own, is all that the
// text has.
const THOUGHT = new RegExp(
  `^\\s{0,8}(${BORDER}?)(?:<think>([\\s\\S]*?)(</think>|$)|([\\s\\S]*?)\\n(</think>)(?=\\n|$))`,
);

// ---- blocks

// No expression may take long for any text: what repeats is bounded, and nothing repeats within
// what repeats.
const FENCE = /^ {0,3}(`{3,}|~{3,}) {0,8}([\w+#.-]{0,40})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const HEADING_MARK = /^ {0,3}#{1,6}\s/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const BULLET = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const TASK = /^\[([ xX])\] /;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;

const cells = (line) =>
  line
    .trim()
    .replace(/^\|/, "")
    .replace(/\|$/, "")
    .split("|")
    .map((cell) => cell.trim());
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
    lines[at] = behindMarker(lines[at]);
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
      out.push(
        element(
          "blockquote",
          blocks(
            lines.slice(at, end).map((l) => l.replace(QUOTE, "")),
            depth + 1,
          ),
        ),
      );
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

const starts = (marked) => {
  const line = marked.replace(BORDER, "");
  return [FENCE, HEADING, RULE, QUOTE, BULLET, FORMULA].some((begins) => begins.test(line));
};

// A line whose border stands before or in what makes it an item, a heading or a quote, with the
// border behind that: a provisional item is drawn as one, too.
function behindMarker(line) {
  const at = line.indexOf(BORDER);
  if (at < 0) return line;
  const plain = line.replace(BORDER, "");
  const marker = [HEADING_MARK, BULLET, QUOTE].map((one) => one.exec(plain)?.[0]).find(Boolean);
  if (!marker || at > marker.length) return line;
  const space = /\s$/.test(marker) ? "" : " "; // of an item that is still empty
  return `${marker}${space}${BORDER}${plain.slice(marker.length)}`;
}

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
    lines[at] = behindMarker(lines[at]);
    const match = BULLET.exec(lines[at]);
    if (!match || /\d/.test(match[2]) !== ordered) break;
    const indent = match[0].length;
    const box = (_, done) => (done === " " ? "☐ " : "☑ ");
    const item = [lines[at].slice(indent).replace(TASK, box)];
    at++;
    while (
      at < lines.length &&
      (!lines[at].trim()
        ? /^\s{2,}/.test(lines[at + 1] ?? "")
        : /^\s{2,}/.test(lines[at]) || !starts(lines[at]))
    ) {
      item.push(lines[at].replace(new RegExp(`^ {0,${indent}}`), ""));
      at++;
    }
    const inner = blocks(item, depth + 1);
    const tight = item.every((line) => line.trim());
    items.push(
      element(
        "li",
        tight ? inner.flatMap((node) => (node.tag === "p" ? node.children : [node])) : inner,
      ),
    );
    const next = () => lines[at + 1]?.replace(BORDER, "") ?? "";
    while (at < lines.length && !lines[at].trim() && BULLET.test(next())) at++;
  }
  const start = ordered ? Number.parseInt(first[2], 10) : 1;
  const numbered = start === 1 ? {} : { start: String(start) };
  out.push(element(ordered ? "ol" : "ul", items, numbered));
  return at;
}

// To which side a divider of a table sends its column; "" for where text begins.
function sideOf(divider) {
  if (!divider.endsWith(":")) return "";
  return divider.startsWith(":") ? "center" : "right";
}

function table(head, divider, rows) {
  const sides = cells(divider).map(sideOf);
  const row = (line, tag) =>
    element(
      "tr",
      cells(line).map((cell, at) =>
        element(tag, inline(cell), sides[at] ? { class: sides[at] } : {}),
      ),
    );
  return element(
    "table",
    [
      element("thead", [row(head, "th")]),
      element(
        "tbody",
        rows.map((line) => row(line, "td")),
      ),
    ],
    { tabindex: "0" },
  );
}

function codeBlock(code, language) {
  const plain = /^(te?xt|plain|output|console)?$/i.test(language) || code.length > 20000;
  const pieces = plain ? [["", code]] : highlight(code);
  return element(
    "pre",
    [
      element(
        "code",
        pieces.map(([kind, text]) => (kind ? element("span", [text], { class: kind }) : text)),
      ),
    ],
    language ? { tabindex: "0", "data-language": language } : { tabindex: "0" },
  );
}

// ---- inline

// Prices are no formulas: a single dollar opens before no space, and closes after no space and
// before no letter or digit.
// Groups are counted over all of these, which the two references back (\8, \10) need.
const INLINE = new RegExp(
  [
    /(`+)/, // 1: code
    /(\$\$|\\\[)((?:\\[^[(]|[^\\]){1,2000}?)(?:\$\$|\\\])/, // 2, 3: a formula of its own
    /\\\(((?:\\[^[(]|[^\\]){1,1000}?)\\\)/, // 4: a formula in the line
    /\$(?![\s$])((?:\\.|[^\\$\n]){1,500})(?<!\s)\$(?!\w)/, // 5: the same, between dollars
    /!?\[([^[\]\n]{0,500})\]\(([^()\s]{0,2000})(?:\s{1,4}"[^"\n]{0,500}")?\)/, // 6, 7: a link
    /(\*\*|__)(?=\S)([\s\S]{0,1000}?\S)\8/, // 8, 9: strong
    /(\*|_)(?=\S)([^*_]{0,1000}?\S)\10(?!\w)/, // 10, 11: emphasis
    /~~(?=\S)([\s\S]{0,1000}?\S)~~/, // 12: struck out
    /(https?:\/\/[^\s<>"')\]]{1,2000})/, // 13: an address
    /\\([\\`*_{}[\]()#+\-.!|~>$])/, // 14: an escaped character
    /( {2,8}\n|\n)/, // 15: the end of a line
  ]
    .map(({ source }) => source)
    .join("|"),
  "g",
);

// Where runs of backticks of each length begin: a code span ends at the next run that is as long as
// its first.
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
  for (let match = pattern.exec(text); match; match = pattern.exec(text)) {
    const [whole, ticks] = match;
    if (isWithinWord(match)) continue;
    const end = ticks ? endOfCode(match, runs) : match.index + whole.length;
    if (end === null) continue; // these backticks open nothing
    pattern.lastIndex = end;
    if (match.index > last) out.push(text.slice(last, match.index));
    out.push(...inlineNode(match, text.slice(match.index, end), depth));
    last = end;
  }
  if (last < text.length) out.push(text.slice(last));
  return out;
}

// An underscore in the middle of a word, as in snake_case.
function isWithinWord(match) {
  return match[10] === "_" && /\w/.test(match.input[match.index - 1] ?? " ");
}

// Where a code span ends that begins here, null if it does not end.
function endOfCode({ 1: ticks, index }, runs) {
  const sameLength = runs.get(ticks.length) ?? [];
  while (sameLength.length && sameLength[0] <= index) sameLength.shift();
  return sameLength.length ? sameLength[0] + ticks.length : null;
}

// What a match of `INLINE` becomes, of all its text `whole`: one node, or none.
function inlineNode(match, whole, depth) {
  const [, ticks, displayed, display, inlined, dollars, label, target] = match;
  const [strongMark, strong, emphasisMark, emphasis, struck, bare, escaped, newline] =
    match.slice(8);
  const inner = (part) => (depth < DEEPEST ? inline(part, depth + 1) : [part]);
  const tex = inlined ?? dollars;
  if (ticks) {
    const code = whole.slice(ticks.length, -ticks.length);
    return [element("code", [code.replace(/^ (.*) $/s, "$1")])];
  }
  if (displayed) return [element("math", [whole], { tex: display, display: "block" })];
  if (tex) return [element("math", [whole], { tex })];
  if (target !== undefined) return [link(target, label ? inner(label) : [target], whole)];
  if (strongMark) return [element("strong", inner(strong))];
  if (emphasisMark) return [element("em", inner(emphasis))];
  if (struck !== undefined) return [element("del", inner(struck))];
  if (bare) return [link(bare, [bare], whole)];
  if (escaped) return [escaped];
  return newline ? [element("br")] : [];
}

// Only addresses that cannot run anything. Pictures become links: nothing is loaded from elsewhere.
function link(target, children, whole) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return whole;
  return element("a", children, { href: target, target: "_blank", rel: "noopener noreferrer" });
}
