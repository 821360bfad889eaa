#!/usr/bin/env bash
# Put headless Chromium into .setup/chromium for tests/unit/report/test_browser.py. Needs npm and node, and no root; about 10 s.
# The npm package contains the browser and its libraries (70 MB), so that it runs where no desktop is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
out=.setup/chromium
[ -x "$out/chrome" ] && exit 0
command -v npm >/dev/null && command -v node >/dev/null || { echo "no npm and node" >&2; exit 1; }
mkdir -p "$out"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm pack --silent @sparticuz/chromium@147.0.0 >/dev/null && tar xzf ./*.tgz)
for name in al2023.tar fonts.tar chromium; do
  node -e 'const {readFileSync, writeFileSync} = require("fs");
    writeFileSync(process.argv[2], require("zlib").brotliDecompressSync(readFileSync(process.argv[1])))' \
    "$work/package/bin/$name.br" "$work/$name"
done
for archive in "$work"/*.tar; do tar xf "$archive" --no-same-owner -C "$out"; done
cat >"$out/fonts.conf" <<END
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>$PWD/$out/fonts</dir><cachedir>$PWD/$out/cache</cachedir></fontconfig>
END
chmod +x "$work/chromium"
mv "$work/chromium" "$out/chrome"
