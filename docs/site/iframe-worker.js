/* Search in pages that are opened from a folder: browsers start no Worker there, so the script of the
 * worker runs in a hidden frame instead. Material for MkDocs would load this from elsewhere. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source !== inside) return;
        const told = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(told);
        if (this.onmessage) this.onmessage(told);
      });
      this.inside = inside;
      this.loaded = new Promise((resolve) => {
        inside.document.open();
        inside.onload = resolve;
        inside.document.write(
          "<script>var postMessage = parent.postMessage.bind(parent);" +
            "var importScripts = (...urls) => urls.reduce((before, url) => before.then(() =>" +
            "new Promise((done) => { const script = document.createElement('script');" +
            "script.src = url; script.onload = done; document.body.append(script); }))," +
            "Promise.resolve());</script>" +
            `<body><script src="${url}"></script></body>`,
        );
        inside.document.close();
      });
    }

    postMessage(data) {
      this.loaded.then(() =>
        this.inside.dispatchEvent(new MessageEvent("message", { data })),
      );
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
