// Addresses of this page's own workers, the only scripts that may be named by a text.

const trusted = globalThis.trustedTypes?.createPolicy("service-worker", {
  createScriptURL: (address) => address,
});

export const script = (address) => (trusted ? trusted.createScriptURL(address) : address);
