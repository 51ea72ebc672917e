// A tree of `markdown.js` as elements; and the mark between what is verified and what is not.

import { parse, TAGS } from "./markdown.js";

const BORDER = "\ue000";  // stands in the text where provisional text begins; taken out of the text itself first

export function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  if (!TAGS.has(node.tag)) throw new Error(`no such tag: ${node.tag}`);
  const element = document.createElement(node.tag);
  for (const [name, value] of Object.entries(node.attrs)) element.setAttribute(name, value);
  element.append(...node.children.map(build));
  return element;
}

export function markdown(settled, provisional = "") {
  const clean = (text) => text.replaceAll(BORDER, "");
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
    if (after && text.data) {
      const span = document.createElement("span");
      span.className = "provisional";
      text.replaceWith(span);
      span.append(text);
    }
  }
}
