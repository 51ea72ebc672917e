// Text from the other end, as one line of bounded length. As moa/safe_text.py.

// Control characters, line and paragraph separators, lone surrogates, and the marks that reorder
// text.
const UNSAFE =
  /[\u0000-\u001f\u007f-\u009f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]|\p{Surrogate}/gu;
const LONGEST = 300;

/** @param {string} text */
export function safeLine(text) {
  const short = text.length <= LONGEST ? text : text.slice(0, LONGEST) + "…";
  return short.replace(UNSAFE, (found) => {
    const code = found.charCodeAt(0);
    const named = { 9: "\\t", 10: "\\n", 13: "\\r" }[code];
    return (
      named ??
      (code < 256
        ? `\\x${code.toString(16).padStart(2, "0")}`
        : `\\u${code.toString(16).padStart(4, "0")}`)
    );
  });
}
