// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/kvroute/kvroute"

// layers lists all packages, from the highest to the lowest. A package may import only packages that
// stand below it, and of these only the ones in its row. "*" is all of them. ARCHITECTURE.md shows
// the list.
var layers = []layer{
	{"programs", []row{
		{"cmd/kvroute", "*"},
	}},
	{"benchmarks and the demo", []row{
		{"bench/interop", "*"},
		{"bench/conformance", "*"},
		{"bench/envoy", "*"},
		{"bench/parts", "*"},
		{"bench/demo", "*"},
		{"bench/policy", "bench bench/replay scorer"},
		{"bench/replay", "bench router scorer slots indexer extproc internal/engine internal/settings"},
		{"bench/chats", "bench internal/openai tokenizer"},
		{"bench", "internal/settings"},
	}},
	{"simulators and helpers of tests", []row{
		{"internal/enginesim", "indexer scorer tokenizer internal/openai internal/zmtp events"},
		{"internal/envoytest", "internal/process"},
		{"internal/epptest", ""},
		{"internal/natstest", "indexer internal/fixtures"},
		{"internal/kubetest", ""},
		{"internal/fixtures", "internal/process"},
		{"internal/process", ""},
		{"internal/arch", ""},
	}},
	{"interfaces", []row{
		{"top", "api attention outcomes router"},
		{"doctor", "api attention envoy replicas router"},
		{"api", "attention dashboard docs router envoy fleet fleet/pods prefill replicas outcomes internal/engine internal/openai internal/reach"},
		{"dashboard", ""},
		{"docs", ""},
		{"attention", "confirm envoy fleet fleet/pods router tokenizer internal/engine"},
		{"sidecar", "engines engines/publish events fleet indexer router internal/engine internal/bus internal/meter internal/reach internal/records internal/silence internal/wire"},
		{"bindings/c", "bindings fleet"},
		{"bindings", "engines engines/publish events fleet indexer internal/bus internal/wire"},
	}},
	{"Envoy's requests", []row{
		{"extproc", "router internal/engine internal/meter internal/openai internal/reach prefill"},
		{"prefill", "internal/openai internal/engine router"},
		{"outcomes", "internal/meter router"},
		{"envoy", "internal/meter internal/openai internal/reach internal/settings"},
	}},
	{"workers and other routers", []row{
		{"replicas", "events fleet indexer router internal/beat internal/meter internal/msgpack internal/wire"},
		{"fleet/pods", "fleet router internal/kube internal/meter internal/wire"},
		{"fleet", "engines engines/dynamo events indexer router internal/beat internal/engine internal/bus internal/kube internal/meter internal/reach internal/wire internal/zmtp"},
		{"internal/replica", "events router"},
		{"internal/openai", "router tokenizer tokenizer/chat internal/jsonscan"},
	}},
	{"decisions", []row{
		{"router", "confirm tokenizer tokenizer/chat scorer slots indexer internal/beat internal/engine internal/meter"},
	}},
	{"events of caches", []row{
		{"engines", "engines/dynamo events events/saved indexer internal/engine internal/bus internal/meter internal/msgpack internal/reach internal/records internal/wire internal/zmtp"},
		{"engines/dynamo", "events internal/meter internal/msgpack internal/zmtp"},
		{"engines/publish", "engines/localindex events events/durable indexer internal/bus internal/meter internal/wire"},
		{"engines/localindex", "events indexer"},
		{"events/durable", "events events/saved internal/bus internal/meter internal/wire"},
		{"events/saved", "events indexer internal/records internal/wire"},
		{"events", "indexer internal/beat internal/bus internal/meter internal/msgpack internal/records internal/wire"},
	}},
	{"parts of a decision", []row{
		{"confirm", "indexer tokenizer/chat"},
		{"scorer", ""},
		{"slots", ""},
		{"indexer", ""},
		{"tokenizer", "tokenizer/chat tokenizer/jinja internal/engine internal/jsonscan"},
		{"tokenizer/chat", "tokenizer/jinja internal/engine internal/jsonscan"},
		{"tokenizer/jinja", "internal/jsonscan"},
	}},
	{"tools", []row{
		{"internal/telemetry", ""},
		{"internal/settings", ""},
		{"internal/bus", ""},
		{"internal/kube", "internal/meter internal/silence"},
		{"internal/reach", "internal/silence"},
		{"internal/records", ""},
		{"internal/wire", ""},
		{"internal/zmtp", "internal/silence"},
		{"internal/msgpack", ""},
		{"internal/jsonscan", ""},
		{"internal/beat", ""},
		{"internal/meter", ""},
		{"internal/engine", ""},
		{"internal/silence", ""},
	}},
}

type (
	layer struct {
		name string
		rows []row
	}
	// row is a package and the packages of this module that it may import.
	row struct{ name, imports string }
)

// rows returns the rows of all layers, from the highest package to the lowest.
func rows() (all []row) {
	for _, l := range layers {
		all = append(all, l.rows...)
	}
	return all
}

// theirs lists the only packages that may import a third-party module.
var theirs = map[string]string{
	"charm.land/bubbletea/v2":                "top",
	"github.com/envoyproxy/go-control-plane": "extproc internal/envoytest",
	"github.com/dlclark/regexp2":             "tokenizer",
	"github.com/goccy/go-yaml":               "cmd/kvroute",
	"github.com/hashicorp/golang-lru":        "indexer router tokenizer internal/enginesim",
	"github.com/nats-io/nats-server":         "internal/bus internal/natstest",
	"github.com/nats-io/nats.go":             "engines/publish events events/durable fleet replicas sidecar cmd/kvroute bindings bench/demo bench/parts bench/interop internal/bus internal/natstest",
	"github.com/prometheus/client_golang":    "internal/telemetry internal/enginesim",
	"github.com/zeebo/xxh3":                  "indexer internal/records internal/wire engines events events/saved",
	"github.com/tinylib/msgp":                "engines events replicas internal/enginesim internal/msgpack",
	"go.etcd.io/etcd/client/v3":              "fleet",
	"go.opentelemetry.io/otel/codes":         "outcomes",
	"go.opentelemetry.io/otel/exporters":     "internal/telemetry",
	"go.opentelemetry.io/otel/propagation":   "extproc outcomes",
	"go.opentelemetry.io/otel/sdk":           "internal/telemetry",
	"go.opentelemetry.io/otel/trace":         "internal/telemetry outcomes",
	"golang.org/x/text":                      "tokenizer tokenizer/jinja bench/chats",
	"golang.org/x/sync":                      "cmd/kvroute sidecar bench/demo",
	"google.golang.org/grpc":                 "extproc cmd/kvroute internal/envoytest bench/envoy",
	"google.golang.org/protobuf":             "extproc internal/envoytest",
}

// free are the modules that any package may import.
var free = []string{"go.opentelemetry.io/otel/metric", "go.opentelemetry.io/otel/attribute"}

// pure are the packages without I/O, log or process, and the packages that neither they nor their
// imports may import. They receive file systems as arguments.
var (
	pure    = strings.Fields("indexer scorer slots tokenizer tokenizer/chat tokenizer/jinja internal/wire")
	impure  = strings.Fields("net/http os log syscall go.opentelemetry.io/otel")
	foreign = regexp.MustCompile(`^[^/]*\.`)
)

// notOutside are packages that only tests and the listed packages may import.
var notOutside = map[string]string{
	"internal/telemetry": "cmd/kvroute bench/demo",
	"internal/enginesim": "cmd/kvroute bench/demo bench/envoy bench/interop",
	"internal/envoytest": "bench/demo bench/envoy bench/interop",
	"cmd/kvroute":        "",
}

// required are the modules that the product is built on. Each must be a direct dependency with a
// use outside tests.
var required = []string{
	"github.com/envoyproxy/go-control-plane/envoy",
	"google.golang.org/grpc",
	"github.com/nats-io/nats.go",
	"github.com/hashicorp/golang-lru/v2",
	"go.opentelemetry.io/otel",
}

// pkg is the input of the import rules.
type pkg struct {
	ImportPath string
	Doc        string   // the first sentence of the package comment
	Imports    []string // without imports of tests
}

func (p *pkg) name() string { return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/") }

// brokenImports returns a sentence for each import that breaks a rule.
func brokenImports(pkgs []pkg) (broken []string) {
	fail := func(format string, args ...any) { broken = append(broken, fmt.Sprintf(format, args...)) }
	place, allowed := map[string]int{}, map[string][]string{}
	for i, r := range rows() {
		place[r.name], allowed[r.name] = i, strings.Fields(r.imports)
	}
	for _, p := range pkgs {
		here, listed := place[p.name()]
		if !listed {
			fail("%s is in no layer", p.name())
		}
		for _, path := range p.Imports {
			if other, inside := strings.CutPrefix(path, module+"/"); inside {
				if !slices.Contains(allowed[p.name()], other) && !slices.Contains(allowed[p.name()], "*") {
					fail("%s must not import %s", p.name(), other)
				}
				if place[other] <= here {
					fail("%s must not import %s, which stands above it in layers", p.name(), other)
				}
				if users, limited := notOutside[other]; limited && !slices.Contains(strings.Fields(users), p.name()) {
					fail("%s is not for %s", other, p.name())
				}
				continue
			}
			if slices.Contains(pure, p.name()) && slices.ContainsFunc(impure, func(banned string) bool {
				return path == "net" || within(path, banned)
			}) {
				fail("%s is pure and must not import %s", p.name(), path)
			}
			if foreign.MatchString(path) && !slices.ContainsFunc(append(slices.Collect(maps.Keys(theirs)), free...),
				func(known string) bool { return within(path, known) }) {
				fail("%s imports %s, which has no home", p.name(), path)
			}
			for prefix, homes := range theirs {
				if within(path, prefix) && !slices.Contains(strings.Fields(homes), p.name()) {
					fail("%s must not import %s, whose home is %s", p.name(), path, homes)
				}
			}
		}
	}
	return broken
}

// within reports whether an import path is that of a module or folder, or lies in it.
func within(path, folder string) bool { return path == folder || strings.HasPrefix(path, folder+"/") }

// unusedRules returns a sentence for each import that a rule allows and that no package has.
func unusedRules(pkgs []pkg) (unused []string) {
	imports := map[string][]string{}
	for _, p := range pkgs {
		imports[p.name()] = p.Imports
	}
	// check reports the names in a list of packages that do not import anything within a path.
	check := func(names, path string) {
		for name := range strings.FieldsSeq(names) {
			if !slices.ContainsFunc(imports[name], func(p string) bool { return within(p, path) }) {
				unused = append(unused, fmt.Sprintf("%s may import %s, but does not: correct the rule", name, path))
			}
		}
	}
	for _, r := range rows() {
		if _, exists := imports[r.name]; !exists {
			unused = append(unused, r.name+" is in layers, but is no package")
		}
		for path := range strings.FieldsSeq(r.imports) {
			if path != "*" && !slices.Contains(imports[r.name], module+"/"+path) {
				unused = append(unused, fmt.Sprintf("%s may import %s, but does not: correct its row", r.name, path))
			}
		}
	}
	for path, homes := range theirs {
		check(homes, path)
	}
	for path, users := range notOutside {
		check(users, module+"/"+path)
	}
	slices.Sort(unused)
	return unused
}

func TestImports(t *testing.T) {
	pkgs := list(t)
	for _, b := range append(brokenImports(pkgs), unusedRules(pkgs)...) {
		t.Error(b)
	}
}

func TestImportRulesCanFail(t *testing.T) {
	made := func(name string, imports ...string) pkg {
		return pkg{ImportPath: module + "/" + name, Imports: imports}
	}
	for want, p := range map[string]pkg{
		"scorer must not import indexer":                made("scorer", module+"/indexer"),
		"internal/telemetry is not for router":          made("router", module+"/internal/telemetry"),
		"router must not import google.golang.org/":     made("router", "google.golang.org/grpc/codes"),
		"scorer is pure and must not import net/http":   made("scorer", "net/http"),
		"scorer is pure and must not import go.opentel": made("scorer", "go.opentelemetry.io/otel/metric"),
		"which has no home":                             made("scorer", "github.com/google/uuid"),
		"born must not import router":                   made("born", module+"/router"),
		"born is in no layer":                           made("born"),
		"bench/demo must not import cmd/kvroute, which": made("bench/demo", module+"/cmd/kvroute"),
	} {
		if got := strings.Join(brokenImports([]pkg{p}), "\n"); !strings.Contains(got, want) {
			t.Errorf("importing %s from %s gives %q, want %q", p.Imports, p.name(), got, want)
		}
	}
	allowed := made("router", module+"/scorer", "go.opentelemetry.io/otel/metric", "sync")
	if got := brokenImports([]pkg{allowed}); len(got) > 0 {
		t.Errorf("allowed imports are refused: %v", got)
	}
	unused := strings.Join(unusedRules([]pkg{allowed}), "\n")
	for _, want := range []string{
		"router may import tokenizer, but does not",
		"router may import github.com/hashicorp/golang-lru, but does not",
		"bench/demo may import " + module + "/internal/telemetry, but does not",
		"scorer is in layers, but is no package",
	} {
		if !strings.Contains(unused, want) {
			t.Errorf("rules that are not used: %q, want %q", unused, want)
		}
	}
	if strings.Contains(unused, "router may import scorer") {
		t.Errorf("a rule that is used is reported: %q", unused)
	}
}

// packageTable returns the table of ARCHITECTURE.md.
func packageTable(pkgs []pkg) string {
	docs := map[string]string{}
	for _, p := range pkgs {
		docs[p.name()] = p.Doc
	}
	var out strings.Builder
	out.WriteString("| layer | package | what it does | imports from this module |\n|---|---|---|---|\n")
	for _, l := range layers {
		name := l.name
		for _, r := range l.rows {
			does := packageStart.ReplaceAllString(docs[r.name], "")
			does = strings.NewReplacer("[", "", "]", "", "|", `\|`).Replace(strings.TrimSuffix(does, "."))
			imports := strings.Join(strings.Fields(r.imports), ", ")
			switch imports {
			case "":
				imports = "–"
			case "*":
				imports = "all below"
			}
			fmt.Fprintf(&out, "| %s | `%s/` | %s | %s |\n", name, r.name, does, imports)
			name = ""
		}
	}
	return out.String()
}

var packageStart = regexp.MustCompile(`^(Package \w+|Command \w+|Kvroute|Conformance) `)

// withTable replaces the table of packages in a document.
func withTable(doc, table string) string {
	return packageRows.ReplaceAllLiteralString(doc, table)
}

var packageRows = regexp.MustCompile(`(?m)^\| layer \| package .*\n(^\|.*\n)+`)

// TestPackageTable compares the table of packages in ARCHITECTURE.md with the packages. With
// KVROUTE_WRITE=1 it writes the table.
func TestPackageTable(t *testing.T) {
	const name = root + "/ARCHITECTURE.md"
	doc, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	table := packageTable(list(t))
	want := withTable(string(doc), table)
	if os.Getenv("KVROUTE_WRITE") != "" {
		if err := os.WriteFile(name, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
	} else if want != string(doc) {
		t.Error("the table of packages in ARCHITECTURE.md is old: run make generate")
	}
	if !strings.Contains(want, table) {
		t.Error("ARCHITECTURE.md has no table that begins with | layer | package")
	}
}

func TestPackageTableCanFail(t *testing.T) {
	old := "text\n\n| layer | package | old |\n|---|---|\n| a | b |\n\nmore\n\n| layer | other |\n"
	if got, want := withTable(old, "| new |\n"), "text\n\n| new |\n\nmore\n\n| layer | other |\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	got := packageTable([]pkg{{ImportPath: module + "/router", Doc: "Package router decides with a|b and [Name]."}})
	want := "| decisions | `router/` | decides with a\\|b and Name | confirm, tokenizer, tokenizer/chat, scorer, slots, indexer, internal/beat, internal/engine, internal/meter |\n"
	if !strings.Contains(got, want) {
		t.Errorf("got %s, want %s", got, want)
	}
}

// list returns the module's packages.
func list(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Doc,Imports", "./...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var pkgs []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
	if len(pkgs) < 10 {
		t.Fatalf("go list found %d packages, want the whole tree", len(pkgs))
	}
	return pkgs
}

const root = "../.."

// files returns the checked kinds of files below the root, by slash-separated path.
func files(t *testing.T) fs.FS {
	t.Helper()
	return os.DirFS(root)
}

func TestRequiredModules(t *testing.T) {
	mod, err := fs.ReadFile(files(t), "go.mod")
	if err != nil {
		t.Fatal(err)
	}
	direct := directModules(string(mod))
	if n := len(direct); n > 26 || n < 5 {
		t.Errorf("%d direct modules, want at most 26:\n%s", n, strings.Join(direct, "\n"))
	}
	if !strings.Contains(string(mod), "\ngo 1.26.0\n") || strings.Contains(string(mod), "\ntoolchain ") {
		t.Error("go.mod must say go 1.26.0, and no toolchain")
	}
	used := map[string]bool{}
	for _, p := range list(t) {
		for _, path := range p.Imports {
			for _, r := range required {
				if path == r || strings.HasPrefix(path, r+"/") {
					used[r] = true
				}
			}
		}
	}
	for _, r := range required {
		if !slices.Contains(direct, r) || !used[r] {
			t.Errorf("%s must be a direct dependency (is it? %v) with a use outside tests (has it? %v)", r, slices.Contains(direct, r), used[r])
		}
	}
}

// directModules returns the modules that go.mod requires without a comment.
func directModules(mod string) (direct []string) {
	for line := range strings.Lines(mod) {
		f := strings.Fields(line)
		if len(f) == 2 && strings.HasPrefix(f[1], "v") && strings.Contains(f[0], ".") {
			direct = append(direct, f[0])
		}
	}
	return direct
}

// goFile is the input of the rules for files.
type goFile struct{ path, text string }

var (
	packageDoc = regexp.MustCompile(`(?m)^// (Package (\w+)|Command \S+|Kvroute|Conformance) [^\n]+\n(//.*\n)*package \w+$`)
	todo       = regexp.MustCompile(`\b(TODO|FIXME|XXX)\b`)
	todoForm   = regexp.MustCompile(`TODO\(#\d+\)`)
	badNames   = []string{"util", "utils", "common", "types", "helpers", "manager", "base", "core", "impl", "pkg"}
)

// brokenFiles returns a sentence for each file or package that breaks a rule.
func brokenFiles(all []goFile) (broken []string) {
	docs := map[string]int{}
	for _, f := range all {
		dir := filepath.ToSlash(filepath.Dir(f.path))
		if strings.Count(dir, "/") > 1 {
			broken = append(broken, f.path+" lies deeper than two folders")
		}
		if slices.Contains(badNames, filepath.Base(dir)) {
			broken = append(broken, dir+" says nothing about what it holds")
		}
		if !strings.HasPrefix(f.text, "// SPDX-License-Identifier: Apache-2.0\n\n") {
			broken = append(broken, f.path+" does not begin with its licence line")
		}
		for n, line := range strings.Split(f.text, "\n") {
			if todo.MatchString(line) && !todoForm.MatchString(line) && !strings.HasPrefix(f.path, "internal/arch/") {
				broken = append(broken, fmt.Sprintf("%s:%d: a TODO needs the number of an issue, as in TODO(#7)", f.path, n+1))
			}
		}
		if strings.HasSuffix(f.path, "_test.go") {
			continue
		}
		docs[dir] += len(packageDoc.FindAllString(f.text, -1))
	}
	for _, dir := range slices.Sorted(maps.Keys(docs)) {
		if docs[dir] != 1 {
			broken = append(broken, fmt.Sprintf("%s has %d package comments, want 1", dir, docs[dir]))
		}
	}
	return broken
}

func TestFiles(t *testing.T) {
	var all []goFile
	err := fs.WalkDir(files(t), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != "." && strings.HasPrefix(d.Name(), ".") {
			return fs.SkipDir
		}
		if strings.HasSuffix(path, ".go") {
			text, err := fs.ReadFile(files(t), path)
			if err != nil {
				return err
			}
			all = append(all, goFile{path, string(text)})
		}
		return nil
	})
	if err != nil || len(all) < 30 {
		t.Fatalf("%d files, %v", len(all), err)
	}
	for _, b := range brokenFiles(all) {
		t.Error(b)
	}
}

func TestFileRulesCanFail(t *testing.T) {
	const spdx, doc = "// SPDX-License-Identifier: Apache-2.0\n\n", "// Package p does.\npackage p\n"
	for want, f := range map[string]goFile{
		"deeper than two":    {"a/b/c/x.go", spdx + doc},
		"says nothing":       {"a/utils/x.go", spdx + doc},
		"licence line":       {"a/x.go", doc},
		"needs the number":   {"a/x.go", spdx + doc + "// TODO later\n"},
		"0 package comments": {"a/x.go", spdx + "package p\n"},
	} {
		if got := strings.Join(brokenFiles([]goFile{f}), "\n"); !strings.Contains(got, want) {
			t.Errorf("%+v gives %q, want %q", f, got, want)
		}
	}
	two := []goFile{{"a/x.go", spdx + doc}, {"a/y.go", spdx + doc}}
	if got := strings.Join(brokenFiles(two), "\n"); !strings.Contains(got, "2 package comments") {
		t.Errorf("two package comments give %q", got)
	}
}

// Documents match the tree and the Makefile.
func TestDocuments(t *testing.T) {
	read := func(name string) string {
		text, err := fs.ReadFile(files(t), name)
		if err != nil {
			t.Errorf("%s must exist: %v", name, err)
		}
		return string(text)
	}
	for _, name := range []string{"LICENSE", "SECURITY.md"} {
		read(name)
	}
	makefile := read("Makefile")
	for _, name := range []string{"README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md", "bench/README.md"} {
		for _, target := range unknownTargets(read(name), makefile) {
			t.Errorf("%s tells of `make %s`, which does not exist", name, target)
		}
	}
	var folders []string
	entries, err := fs.ReadDir(files(t), ".")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() && !strings.HasPrefix(e.Name(), ".") {
			folders = append(folders, e.Name())
		}
	}
	for _, b := range brokenPicture(read("ARCHITECTURE.md"), folders, func(path string) bool {
		_, err := fs.Stat(files(t), path)
		return err == nil
	}) {
		t.Error(b)
	}
}

var makeWord = regexp.MustCompile("`make ([a-z][a-z-]*)")

func unknownTargets(doc, makefile string) (unknown []string) {
	known := map[string]bool{}
	for lines := bufio.NewScanner(strings.NewReader(makefile)); lines.Scan(); {
		if name, _, ok := strings.Cut(lines.Text(), ":"); ok {
			known[name] = true
		}
	}
	for _, m := range makeWord.FindAllStringSubmatch(doc, -1) {
		if !known[m[1]] {
			unknown = append(unknown, m[1])
		}
	}
	return unknown
}

var pathWord = regexp.MustCompile("`([a-z]+(?:/[A-Za-z0-9_.-]+)*/?)`")

// brokenPicture compares the folders that a document names with the existing folders.
func brokenPicture(doc string, folders []string, exists func(path string) bool) (broken []string) {
	for _, f := range folders {
		if !strings.Contains(doc, "`"+f+"/") {
			broken = append(broken, fmt.Sprintf("ARCHITECTURE.md does not name `%s/`", f))
		}
	}
	for _, m := range pathWord.FindAllStringSubmatch(doc, -1) {
		if strings.Contains(m[1], "/") && !exists(strings.TrimSuffix(m[1], "/")) {
			broken = append(broken, fmt.Sprintf("ARCHITECTURE.md names `%s`, which does not exist", m[1]))
		}
	}
	return broken
}

func TestDocumentRulesCanFail(t *testing.T) {
	if got := unknownTargets("`make demo` and `make tea`", "demo: build\n\ttrue\n"); len(got) != 1 || got[0] != "tea" {
		t.Errorf("unknown targets: %v, want tea", got)
	}
	got := brokenPicture("`router/` and `nowhere/x.go`", []string{"router", "events"}, func(path string) bool { return path == "router" })
	if len(got) != 2 || !strings.Contains(got[0], "`events/`") || !strings.Contains(got[1], "nowhere/x.go") {
		t.Errorf("broken picture: %v", got)
	}
}
