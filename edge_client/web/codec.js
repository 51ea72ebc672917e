// Text to ids and back, over two packages from npm: tokenizer and chat template of a bundle
// (edge_client/text).

import { Template } from "./vendor/jinja.js";
import { Tokenizer } from "./vendor/tokenizers.js";

// JavaScript's \s has U+FEFF and lacks U+0085. The package says so of patterns only: what
// `ByteLevel` splits by itself is given to it as a pattern.
const WORDS = [
  "'s|'t|'re|'ve|'m|'ll|'d",
  String.raw` ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+`,
  String.raw`\s+(?!\S)|\s+`,
].join("|");

function explicit(step) {
  if (step?.type === "Sequence") {
    return { ...step, pretokenizers: step.pretokenizers.flatMap(explicit) };
  }
  if (step?.type !== "ByteLevel" || step.use_regex === false) return step;
  const split = { type: "Split", pattern: { Regex: WORDS }, behavior: "Isolated", invert: false };
  return { type: "Sequence", pretokenizers: [split, { ...step, use_regex: false }] };
}

export class Codec {
  // `special` are the names of special tokens that a template may use, and their text.
  constructor(tokenizer, template, special) {
    this.tokenizer = new Tokenizer(
      { ...tokenizer, pre_tokenizer: explicit(tokenizer.pre_tokenizer) },
      {},
    );
    this.template = template && new Template(template);
    this.special = special;
  }

  // An answer at the end is gone on with.
  render(messages) {
    const last = messages.at(-1);
    const [asked, begun] =
      last.role === "assistant" ? [messages.slice(0, -1), last.content] : [messages, ""];
    if (!this.template) return asked.at(-1).content + begun;
    return (
      this.template.render({
        tools: null,
        documents: null,
        add_generation_prompt: true,
        ...this.special,
        messages: asked,
      }) + begun
    );
  }

  encode(text) {
    return Array.from(this.tokenizer.encode(text, { add_special_tokens: false }).ids);
  }

  decode(ids) {
    // without special tokens
    return ids.length
      ? this.tokenizer.decode(ids, {
          skip_special_tokens: true,
          clean_up_tokenization_spaces: false,
        })
      : "";
  }
}
