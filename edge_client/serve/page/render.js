// A tree of `markdown.js` as elements; and the mark between what is verified and what is not.

import { BORDER, parse, TAGS } from "./markdown.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
// TeX comes from a model: no definitions, few macros, no sizes beyond the line, and what is not
// understood stays as it was written. A definition could make megabytes of a short formula:
// `maxExpand` counts uses, not what they make.
const TEX = { throwOnError: true, maxExpand: 200, maxSize: [20, 200] };
const DEFINITIONS = [
  "\\def",
  "\\gdef",
  "\\edef",
  "\\xdef",
  "\\let",
  "\\\\globallet",
  "\\futurelet",
  "\\newcommand",
  "\\renewcommand",
  "\\providecommand",
  "\\global",
  "\\long",
];
const FRAME = 50; // ms for formulas that are new in a frame; the others follow in the next ones
// Characters of TeX in one message: a browser lays out some thousand elements a second.
const MOST_SHOWN = 16_000;
// Characters of formulas whose elements are kept: a stream shows each of them many times.
const MOST_KEPT = 200_000;

const kept = new Map(); // formula and display -> its element, null if it is none
let size = 0;
let spent = 0;
let room = 0;
let waiting = false;

// The options of one formula; what it defined would otherwise be there in the next one.
export const options = (block) => ({
  ...TEX,
  displayMode: block,
  macros: Object.fromEntries(DEFINITIONS.map((name) => [name, "\\undefined"])),
});

// Whether formulas were put off to the next frame since the last call.
export function putOff() {
  const some = waiting;
  waiting = false;
  if (some) {
    requestAnimationFrame(() => {
      spent = 0;
    });
  }
  return some;
}

export function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  if (!TAGS.has(node.tag)) throw new Error(`no such tag: ${node.tag}`);
  if (node.tag === "math") {
    return formula(node.children[0], node.attrs.tex, node.attrs.display === "block");
  }
  const element = document.createElement(node.tag);
  for (const [name, value] of Object.entries(node.attrs)) element.setAttribute(name, value);
  element.append(...node.children.map(build));
  return element;
}

function formula(source, tex, block) {
  const made = shown(tex.replaceAll(BORDER, ""), block);
  if (!made) return document.createTextNode(source);
  const marked = document.createDocumentFragment();
  marked.append(...(source.includes(BORDER) ? [BORDER, made] : [made]));
  return marked;
}

// A formula's element; null if it is none, or not yet.
function shown(tex, block) {
  const key = `${block} ${tex}`;
  room -= tex.length;
  if (room < 0) return null;
  if (!kept.has(key)) {
    if (spent > FRAME) {
      waiting = true;
      return null;
    }
    const began = performance.now();
    kept.set(key, rendered(tex, block));
    spent += performance.now() - began;
    size += key.length;
    for (const old of kept.keys()) {
      if (size <= MOST_KEPT) break;
      kept.delete(old);
      size -= old.length;
    }
  }
  return kept.get(key)?.cloneNode(true) ?? null;
}

function rendered(tex, block) {
  const made = document.createElement("span");
  made.className = block ? "math block" : "math";
  if (block) made.tabIndex = 0;
  try {
    temml.render(tex, made, options(block));
  } catch {
    return null;
  }
  const foreign = (one) =>
    one.id || one.hasAttribute("href") || (one.namespaceURI !== MATHML && one.localName !== "span");
  return [...made.querySelectorAll("*")].some(foreign) ? null : made;
}

export function markdown(settled, provisional = "") {
  room = MOST_SHOWN;
  const clean = (text) => text.replaceAll(BORDER, ""); // the text itself has none
  const source = clean(settled) + (provisional ? BORDER + clean(provisional) : "");
  const fragment = document.createDocumentFragment();
  fragment.append(...parse(source).map(build));
  mark(fragment);
  return fragment;
}

// Wraps all text after the border.
function mark(fragment) {
  const walker = document.createTreeWalker(fragment, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  let after = false;
  for (let text of texts) {
    const at = text.data.indexOf(BORDER);
    if (at >= 0) {
      const rest = text.splitText(at);
      rest.data = rest.data.slice(1);
      [after, text] = [true, rest];
    }
    const math = text.parentElement?.closest(".math");
    if (math) {
      math.classList.toggle("provisional", after);
    } else if (after && text.data) {
      const span = document.createElement("span");
      span.className = "provisional";
      text.replaceWith(span);
      span.append(text);
    }
  }
}
