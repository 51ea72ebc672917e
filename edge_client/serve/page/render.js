// A tree of `markdown.js` as elements; and the mark between what is verified and what is not.

import { BORDER, parse, TAGS } from "./markdown.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
// TeX comes from a model: few macros, no sizes beyond the line, and what is not understood stays as it was written.
const TEX = { throwOnError: true, maxExpand: 200, maxSize: [20, 200] };

export function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  if (!TAGS.has(node.tag)) throw new Error(`no such tag: ${node.tag}`);
  if (node.tag === "math") return formula(node.children[0], node.attrs.tex, node.attrs.display === "block");
  const element = document.createElement(node.tag);
  for (const [name, value] of Object.entries(node.attrs)) element.setAttribute(name, value);
  element.append(...node.children.map(build));
  return element;
}

function formula(source, tex, block) {
  const made = document.createElement("span");
  made.className = block ? "math block" : "math";
  if (block) made.tabIndex = 0;
  try {
    temml.render(tex.replaceAll(BORDER, ""), made, { ...TEX, displayMode: block });
    const foreign = (one) => one.id || one.hasAttribute("href") || (one.namespaceURI !== MATHML && one.localName !== "span");
    if ([...made.querySelectorAll("*")].some(foreign)) throw new Error("more than MathML");
  } catch {
    return document.createTextNode(source);
  }
  const marked = document.createDocumentFragment();
  marked.append(...(source.includes(BORDER) ? [BORDER, made] : [made]));
  return marked;
}

export function markdown(settled, provisional = "") {
  const clean = (text) => text.replaceAll(BORDER, "");  // the text itself has none
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
