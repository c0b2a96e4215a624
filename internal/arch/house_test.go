// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/scanner"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// tokenLimits limits the tokens of each package of the product: of its Go files without comments,
// tests, generated files and templates of text/template. A limit is the number that was measured when it was set, plus
// 2 %, or plus 100 if that is more. CONTRIBUTING.md says when a limit is raised.
var tokenLimits = map[string]int{
	"confirm":            9069,
	"api":                11420,
	"attention":          5800,
	"bindings":           1608,
	"bindings/c":         1220,
	"cmd/kvroute":        38350,
	"dashboard":          317,
	"docs":               110,
	"doctor":             4110,
	"engines":            25880,
	"engines/dynamo":     3159,
	"engines/localindex": 971,
	"engines/publish":    2560,
	"envoy":              9837,
	"events":             24300,
	"events/durable":     9936,
	"events/saved":       4554,
	"extproc":            21229,
	"fleet":              29234,
	"fleet/pods":         7513,
	"indexer":            32290,
	"internal/beat":      260,
	"internal/bus":       2234,
	"internal/engine":    1253,
	"internal/jsonscan":  2399,
	"internal/kube":      4308,
	"internal/meter":     1502,
	"internal/msgpack":   1988,
	"internal/openai":    18456,
	"internal/reach":     2121,
	"internal/records":   1978,
	"internal/replica":   834,
	"internal/settings":  1152,
	"internal/silence":   456,
	"internal/telemetry": 3400,
	"internal/wire":      711,
	"internal/zmtp":      3842,
	"outcomes":           5915,
	"prefill":            2195,
	"replicas":           18835,
	"router":             69688,
	"scorer":             6700,
	"sidecar":            3718,
	"slots":              9497,
	"tokenizer":          44258,
	"tokenizer/chat":     25665,
	"tokenizer/jinja":    55700,
	"top":                5755,
}

const (
	// productLimit limits the sum of the product's packages: 1,000 more than was measured, which is
	// much less than the sum of their limits.
	productLimit = 532400
	// supportLimit limits the tokens of bench and simulators together.
	supportLimit = 150_700
	// longLine is the number of characters above which a line is long; a tab counts as one.
	longLine = 120
	// longLinesLimit limits the long lines of the product, in lines out of 1,000.
	longLinesLimit = 6
	// longest limits the lines of a function, longestFile those of a file. These limits only fall.
	longest, longestFile = 80, 500
	// productBack and supportBack limit the references between the files of a package that run back
	// up, in percent.
	productBack, supportBack = 20, 25
	// unusedLimit limits the exported names, in all packages together, that no other package uses.
	// Methods and fields are not counted, and uses in tests do not count.
	unusedLimit = 73
)

// supports are bench and the simulators: packages that are no part of the product.
var supports = strings.Fields("internal/arch internal/enginesim internal/envoytest internal/epptest internal/fixtures internal/kubetest internal/natstest internal/process")

func isSupport(name string) bool {
	return name == "bench" || strings.HasPrefix(name, "bench/") || slices.Contains(supports, name)
}

// TestHouse prints the table of packages and fails if a package is above a limit.
func TestHouse(t *testing.T) {
	measured := measureHouse(t)
	for _, b := range brokenLimits(measured, t.Log) {
		t.Error(b)
	}
	for _, b := range staleLimits(measured) {
		t.Error(b)
	}
}

// staleLimits returns a sentence for each limit that is far above what is measured: it would let the package
// grow again unseen. A clean-up lowers the limits, as CONTRIBUTING.md says.
func staleLimits(measured map[string]measure) (stale []string) {
	check := func(name string, tokens, limit int) {
		if limit > tokens+max(tokens/20, 250) {
			stale = append(stale, fmt.Sprintf("%s has %d tokens, and a limit of %d: lower it to %d", name, tokens, limit, tokens+max(tokens/50, 100)))
		}
	}
	product := 0
	for name, limit := range tokenLimits {
		check(name, measured[name].tokens, limit)
		product += measured[name].tokens
	}
	if productLimit > product+2500 {
		stale = append(stale, fmt.Sprintf("the product has %d tokens, and a limit of %d: lower it to %d", product, productLimit, product+1000))
	}
	slices.Sort(stale)
	return stale
}

// A measure holds the measured numbers of one package, or of several.
type measure struct {
	files       int
	tokens      int      // without comments and the semicolons that Go inserts
	codeLines   int      // without comments and blank lines
	lines, long int      // all lines, and those with more than longLine characters
	longest     int      // lines of the longest function
	function    string   // its name
	longestFile int      // lines of the longest file, with comments and blank lines
	file        string   // its name
	references  int      // pairs of files of one package where the first uses the second
	back        int      // of these, those that run from a lower to a higher file
	unused      []string // exported names that no other package uses
}

// add adds the numbers that have a limit for several packages together.
func (m *measure) add(other *measure) {
	m.files += other.files
	m.tokens += other.tokens
	m.codeLines += other.codeLines
	m.lines += other.lines
	m.long += other.long
	m.unused = append(m.unused, other.unused...)
}

// row is one row of the table that `make house` prints.
func (m *measure) row(name string, limit int) string {
	perLine := float64(m.tokens) / float64(max(m.codeLines, 1))
	row := fmt.Sprintf("%-20s %5d %7d %7d %8.2f %5d", name, m.files, m.tokens, limit, perLine, m.long)
	if m.function == "" {
		return row
	}
	return fmt.Sprintf("%s  %3d %-36s %3d, %d", row, m.longest, m.function, m.references, m.back)
}

// brokenLimits prints the table and returns a sentence for each limit that is exceeded.
func brokenLimits(measured map[string]measure, say func(...any)) (broken []string) {
	fail := func(format string, args ...any) { broken = append(broken, fmt.Sprintf(format, args...)) }
	say(fmt.Sprintf("%-20s %5s %7s %7s %8s %5s  %-40s %s", "package", "files", "tokens", "limit", "a line", "long", "longest function", "references, back up"))
	var product, support measure
	for _, name := range slices.Sorted(maps.Keys(measured)) {
		m := measured[name]
		limit, back := tokenLimits[name], productBack
		if isSupport(name) {
			back = supportBack
			support.add(&m)
		} else {
			product.add(&m)
			say(m.row(name, limit))
		}
		switch {
		case isSupport(name):
		case limit == 0:
			fail("%s has no limit: add it to tokenLimits", name)
		case m.tokens > limit:
			fail("%s has %d tokens, at most %d: see \"Size\" in CONTRIBUTING.md", name, m.tokens, limit)
		}
		if m.longest > longest {
			fail("%s has %d lines, at most %d", m.function, m.longest, longest)
		}
		if m.longestFile > longestFile {
			fail("%s has %d lines, at most %d", m.file, m.longestFile, longestFile)
		}
		if m.references > 10 && m.back*100 > m.references*back {
			fail("%s: %d of %d references between files run back up, at most %d %% may", name, m.back, m.references, back)
		}
	}
	say(product.row("product", productLimit))
	say(support.row("bench and simulators", supportLimit))
	say(fmt.Sprintf("%d of the product's %d lines have more than %d characters: %.2f %%, at most %.2f %%",
		product.long, product.lines, longLine, float64(product.long*100)/float64(max(product.lines, 1)), longLinesLimit/10.0))
	if product.tokens > productLimit {
		fail("product has %d tokens, at most %d: see \"Size\" in CONTRIBUTING.md", product.tokens, productLimit)
	}
	if support.tokens > supportLimit {
		fail("bench and simulators have %d tokens, at most %d: see \"Size\" in CONTRIBUTING.md", support.tokens, supportLimit)
	}
	if product.long*1000 > product.lines*longLinesLimit {
		fail("%d of %d lines have more than %d characters, at most %d may", product.long, product.lines, longLine, product.lines*longLinesLimit/1000)
	}
	unused := append(product.unused, support.unused...)
	if slices.Sort(unused); len(unused) > unusedLimit {
		fail("%d exported names are used by no other package, at most %d may: %s", len(unused), unusedLimit, strings.Join(unused, " "))
	}
	for name := range tokenLimits {
		if _, exists := measured[name]; !exists {
			fail("tokenLimits has %s, which is no package", name)
		}
	}
	slices.Sort(broken)
	return broken
}

// A checkedPackage is a type-checked package of the module, without tests.
type checkedPackage struct {
	path  string // below the root of the module
	fset  *token.FileSet
	files []*ast.File
	types *types.Package
	info  *types.Info
	// imported returns another package of the module, of its dependencies or of the standard
	// library by its import path.
	imported func(path string) (*types.Package, error)
}

// checkPackages type-checks each package of the module.
func checkPackages(t *testing.T) (checked []checkedPackage) {
	t.Helper()
	cmd := exec.Command("go", "list", "-export", "-deps", "-json=ImportPath,Dir,GoFiles,CgoFiles,Export,Module", "./...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	type listed struct {
		ImportPath, Dir, Export string
		GoFiles, CgoFiles       []string
		Module                  *struct{ Main bool }
	}
	exports, ours := map[string]string{}, []listed{}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		exports[p.ImportPath] = p.Export
		if p.Module != nil && p.Module.Main {
			ours = append(ours, p)
		}
	}
	fset := token.NewFileSet()
	imports := importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	for _, p := range ours {
		c := checkedPackage{path: strings.TrimPrefix(p.ImportPath, module+"/"), fset: fset, imported: imports.Import}
		for _, name := range append(p.GoFiles, p.CgoFiles...) {
			f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.ParseComments|parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			c.files = append(c.files, f)
		}
		c.info = &types.Info{Uses: map[*ast.Ident]types.Object{}, Types: map[ast.Expr]types.TypeAndValue{}}
		conf := types.Config{Importer: imports, FakeImportC: true}
		if c.types, err = conf.Check(p.ImportPath, fset, c.files, c.info); err != nil {
			t.Fatal(err)
		}
		checked = append(checked, c)
	}
	return checked
}

// measureHouse measures each package of the module, by its path below the root.
func measureHouse(t *testing.T) map[string]measure {
	t.Helper()
	measured, used := map[string]measure{}, map[string]bool{}
	for _, p := range checkPackages(t) {
		fset, pkg, info, path := p.fset, p.types, p.info, p.path
		var m measure
		for _, f := range p.files {
			if ast.IsGenerated(f) {
				continue
			}
			m.files++
			m.count(t, fset.Position(f.Pos()).Filename)
			if n := fset.Position(f.FileEnd).Line; n > m.longestFile {
				m.longestFile, m.file = n, filepath.Join(path, filepath.Base(fset.Position(f.Pos()).Filename))
			}
			for _, d := range f.Decls {
				if fn, ok := d.(*ast.FuncDecl); ok {
					if n := fset.Position(fn.End()).Line - fset.Position(fn.Pos()).Line + 1; n > m.longest {
						m.longest, m.function = n, pkg.Name()+"."+fn.Name.Name
					}
				}
			}
		}
		arrows := references(fset, pkg, info)
		m.references, m.back = len(arrows), backwards(arrows)
		var mentioned strings.Builder // signatures of the exported names: types that occur in them are not unused
		for _, name := range pkg.Scope().Names() {
			if !ast.IsExported(name) || pkg.Name() == "main" {
				continue
			}
			obj := pkg.Scope().Lookup(name)
			// The values of an enumeration are part of its type.
			if _, isBasic := obj.Type().(*types.Basic); !isConst(obj) || isBasic {
				m.unused = append(m.unused, path+"."+name)
			}
			_, declared, _ := strings.Cut(types.ObjectString(obj, types.RelativeTo(pkg)), name)
			mentioned.WriteString(declared + "\n")
			if _, isType := obj.(*types.TypeName); isType {
				for method := range types.NewMethodSet(types.NewPointer(obj.Type())).Methods() {
					mentioned.WriteString(types.TypeString(method.Type(), types.RelativeTo(pkg)) + "\n")
				}
			}
		}
		m.unused = slices.DeleteFunc(m.unused, func(name string) bool {
			_, isType := pkg.Scope().Lookup(strings.TrimPrefix(name, path+".")).(*types.TypeName)
			return isType && regexp.MustCompile(`\b`+strings.TrimPrefix(name, path+".")+`\b`).MatchString(mentioned.String())
		})
		for _, obj := range info.Uses {
			if obj.Pkg() != nil && obj.Pkg() != pkg && obj.Parent() == obj.Pkg().Scope() {
				used[strings.TrimPrefix(obj.Pkg().Path(), module+"/")+"."+obj.Name()] = true
			}
		}
		measured[path] = m
	}
	for path, m := range measured {
		m.unused = slices.DeleteFunc(m.unused, func(name string) bool { return used[name] })
		measured[path] = m
	}
	return measured
}

func isConst(obj types.Object) bool {
	_, ok := obj.(*types.Const)
	return ok
}

// count adds the tokens and lines of a file.
func (m *measure) count(t *testing.T, name string) {
	t.Helper()
	src, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(src)) {
		m.lines++
		if utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > longLine {
			m.long++
		}
	}
	fset := token.NewFileSet()
	file := fset.AddFile(name, -1, len(src))
	var s scanner.Scanner
	s.Init(file, src, nil, 0)
	last := 0 // the last line that is counted as code
	for {
		pos, tok, text := s.Scan()
		if tok == token.EOF {
			return
		}
		if tok == token.SEMICOLON && text == "\n" {
			continue
		}
		m.tokens++
		first := file.Line(pos)
		end := first + strings.Count(text, "\n")
		m.codeLines += end - max(first-1, last)
		last = max(last, end)
	}
}

// An arrow means that one file uses something that another file of its package declares.
type arrow struct{ from, to string }

func references(fset *token.FileSet, pkg *types.Package, info *types.Info) map[arrow]bool {
	arrows := map[arrow]bool{}
	for id, obj := range info.Uses {
		if obj.Pkg() != pkg {
			continue
		}
		a := arrow{fset.Position(id.Pos()).Filename, fset.Position(obj.Pos()).Filename}
		if a.from != a.to && a.to != "" {
			arrows[a] = true
		}
	}
	return arrows
}

// backwards orders the files so that few arrows run from a lower file to a higher one, and returns
// the number of those that do. The order is that of Eades, Lin and Smyth (1993), improved by
// moving single files while that helps. Finding the true minimum is too expensive.
func backwards(arrows map[arrow]bool) int {
	names := map[string]bool{}
	for a := range arrows {
		names[a.from], names[a.to] = true, true
	}
	left := make([]string, 0, len(names))
	for n := range names {
		left = append(left, n)
	}
	slices.Sort(left)
	// degree is the number of arrows that leave a file minus those that reach it, among the
	// remaining files.
	degree := func(n string) (d int) {
		for _, other := range left {
			if arrows[arrow{n, other}] {
				d++
			}
			if arrows[arrow{other, n}] {
				d--
			}
		}
		return d
	}
	var order []string
	for len(left) > 0 {
		top := 0
		for i := range left {
			if degree(left[i]) > degree(left[top]) {
				top = i
			}
		}
		order, left = append(order, left[top]), slices.Delete(left, top, top+1)
	}
	for moved := true; moved; {
		moved = false
		for i := range order {
			n, best, to := order[i], 0, i
			for _, step := range []int{-1, 1} {
				gain := 0
				for j := i + step; j >= 0 && j < len(order); j += step {
					// Moving n above order[j] corrects an arrow from n to it, and breaks an arrow
					// from it to n.
					mended, broken := arrows[arrow{n, order[j]}], arrows[arrow{order[j], n}]
					if step > 0 {
						mended, broken = broken, mended
					}
					if mended {
						gain++
					}
					if broken {
						gain--
					}
					if gain > best {
						best, to = gain, j
					}
				}
			}
			if best > 0 {
				order = slices.Insert(slices.Delete(order, i, i+1), to, n)
				moved = true
			}
		}
	}
	place := map[string]int{}
	for i, n := range order {
		place[n] = i
	}
	back := 0
	for a := range arrows {
		if place[a.from] > place[a.to] {
			back++
		}
	}
	return back
}

func TestHouseRulesCanFail(t *testing.T) {
	quiet := func(...any) {}
	// whole returns measures of all packages at their limits, and product and support at theirs.
	whole := func() map[string]measure {
		m := map[string]measure{"bench": {files: 1, tokens: supportLimit, longest: longest, function: "bench.f", references: 100, back: supportBack}}
		left := productLimit
		for _, p := range slices.Sorted(maps.Keys(tokenLimits)) {
			tokens := min(tokenLimits[p], left)
			left -= tokens
			m[p] = measure{files: 1, tokens: tokens, lines: 1000, long: longLinesLimit, longest: longest, function: p + ".f", references: 100, back: productBack}
		}
		return m
	}
	if got := brokenLimits(whole(), quiet); len(got) > 0 {
		t.Errorf("at every limit: %q", got)
	}
	for want, change := range map[string]func(m, scorer *measure){
		"scorer has ":                     func(_, m *measure) { m.tokens = tokenLimits["scorer"] + 1 },
		"product has ":                    func(_, m *measure) { m.tokens = productLimit + 1 },
		"bench and simulators have ":      func(m, _ *measure) { m.tokens++ },
		" lines have more than 120 ":      func(_, m *measure) { m.long++ },
		"scorer/f.go has ":                func(_, m *measure) { m.longestFile, m.file = longestFile+1, "scorer/f.go" },
		"exported names are used by no ":  func(_, m *measure) { m.unused = make([]string, unusedLimit+1) },
		"scorer.f has ":                   func(_, m *measure) { m.longest++ },
		"scorer: 21 of 100 references be": func(_, m *measure) { m.back++ },
		"bench: 26 of 100 references bet": func(m, _ *measure) { m.back++ },
	} {
		m := whole()
		bench, scorer := m["bench"], m["scorer"]
		change(&bench, &scorer)
		m["bench"], m["scorer"] = bench, scorer
		if got := strings.Join(brokenLimits(m, quiet), "\n"); !strings.Contains(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	shrunk := map[string]measure{"scorer": {tokens: tokenLimits["scorer"] * 9 / 10}}
	if got := strings.Join(staleLimits(shrunk), "\n"); !strings.Contains(got, "scorer has ") || !strings.Contains(got, "the product has ") {
		t.Errorf("after a clean-up: %q", got)
	}
	m := whole()
	m["born"] = measure{}
	delete(m, "scorer")
	got := strings.Join(brokenLimits(m, quiet), "\n")
	if !strings.Contains(got, "born has no limit") || !strings.Contains(got, "scorer, which is no package") {
		t.Errorf("with a new package and without scorer: %q", got)
	}
	circle := map[arrow]bool{{"a", "b"}: true, {"b", "c"}: true, {"c", "a"}: true, {"a", "c"}: true, {"c", "d"}: true}
	if got := backwards(circle); got != 1 {
		t.Errorf("%d arrows of a circle run back up, want 1", got)
	}
	name := filepath.Join(t.TempDir(), "x.go")
	long := "\tä := 1 // " + strings.Repeat("ä", longLine-11)
	src := "// a\npackage x /* b\n c */\n\nvar s = `1\n2\n` // d\nfunc f() {\n" + long + "\n" + long + "ä\n}\n"
	if err := os.WriteFile(name, []byte(src), 0o600); err != nil {
		t.Fatal(err)
	}
	var one measure
	one.count(t, name)
	if one.tokens != 18 || one.codeLines != 8 || one.lines != 11 || one.long != 1 {
		t.Errorf("%+v, want 18 tokens, 8 lines of code, 11 lines, 1 long line", one)
	}
}
