// Server-sent events of a response, as fetch gives it.

/** Yields { id, data } for each event. `heard` is called with the size of whatever arrives,
 * comments too.
 * @param {Response} response
 * @param {(size: number) => void} heard */
export async function* events(response, heard = () => {}) {
  let buffer = "";
  const decoder = new TextDecoder();
  for await (const bytes of pieces(/** @type {ReadableStream<Uint8Array>} */ (response.body))) {
    heard(bytes.length);
    buffer += decoder.decode(bytes, { stream: true });
    const frames = buffer.split("\n\n");
    buffer = frames.pop() ?? "";
    for (const frame of frames) {
      const event = { id: "", data: "" };
      for (const line of frame.split("\n")) {
        if (line.startsWith("id: ")) event.id = line.slice(4);
        if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      if (event.data) yield event;
    }
  }
}

/** @param {ReadableStream<Uint8Array>} body */
async function* pieces(body) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
