// Colours for code: comments, strings, numbers and the words that most languages share.

const WORDS = new Set(
  (
    "abstract and as assert async await bool break case catch class const continue def default " +
    "del do elif else end enum except export extends false False final finally float fn for from " +
    "func function global if impl implements import in int interface is lambda let local match " +
    "mut new nil None not null or package pass private protected pub public raise return self " +
    "static str string struct super switch then this throw trait true True try type typeof " +
    "undefined use var void where while with yield " +
    "select insert update delete create table from join on group by order limit"
  ).split(" "),
);

const COMMENT = /\/\*[\s\S]*?(?:\*\/|$)|\/\/[^\n]*|(?:^|(?<=\s))#[^\n]*|--\s[^\n]*/;
const STRING = /"""[\s\S]*?(?:"""|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|`(?:\\.|[^`\\])*`?/;
const NUMBER = /\b\d[\w.]*\b/;
const WORD = /[A-Za-z_]\w*/;
const KINDS = [COMMENT, STRING, NUMBER, WORD]; // the first that fits
const TOKEN = new RegExp(KINDS.map(({ source }) => `(${source})`).join("|"), "g");

function classOf({ comment, string, number, word }) {
  if (comment) return "hl-comment";
  if (string) return "hl-string";
  if (number) return "hl-number";
  return WORDS.has(word) ? "hl-keyword" : "";
}

// Pieces of code as [class or "", text].
export function highlight(code) {
  const pieces = [];
  let last = 0;
  for (const match of code.matchAll(TOKEN)) {
    const [text, comment, string, number, word] = match;
    const kind = classOf({ comment, string, number, word });
    if (!kind) continue;
    if (match.index > last) pieces.push(["", code.slice(last, match.index)]);
    pieces.push([kind, text]);
    last = match.index + text.length;
  }
  if (last < code.length) pieces.push(["", code.slice(last)]);
  return pieces;
}
