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
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A room is one row of the table that `make house` prints: the packages of one subject, and the
// limit of their code lines together.
type room struct {
	packages string // separated by spaces; "bench/*" is bench with its sub-packages
	limit    int    // code lines: without comments, blank lines, tests and generated files
	back     int    // limit of the references between a package's files that run back up, in percent
}

// product and support name all packages of the module. The limits are the current numbers of
// lines. Limits only fall: a change that adds lines must remove as many elsewhere. Two features were
// allowed to add 4,000 lines to the product together: prefill and decode on different workers, and
// what shows operators the effect of routing (outcomes, audit, traces, dashboard, top). The cost that counts
// decoding added 400 lines to the product, and its loads, queue, agents and gates 1,160 to the benchmarks.
var (
	product = []room{
		{"cmd/kvroute", 4115, 20},
		{"extproc", 2182, 20},
		{"router", 5572, 20},
		{"prefill", 261, 20},
		{"outcomes", 263, 20},
		{"scorer slots", 1990, 20},
		{"indexer", 3221, 20},
		{"events internal/msgpack", 4389, 20},
		{"engines engines/localindex", 3598, 20},
		{"fleet", 2164, 20},
		{"replicas", 2262, 20},
		{"api bindings bindings/c envoy internal/bus internal/engine internal/jsonscan internal/meter internal/openai internal/reach internal/records internal/replica internal/settings internal/telemetry internal/wire internal/zmtp", 5012, 20},
		{"sidecar", 465, 20},
		{"doctor", 457, 20},
		{"dashboard", 36, 20},
		{"top", 441, 20},
		{"tokenizer tokenizer/chat tokenizer/jinja", 11269, 20},
	}
	support = []room{
		{"bench bench/* internal/arch internal/enginesim internal/envoytest internal/epptest internal/fixtures internal/natstest internal/process", 14000, 25},
	}
	// The limits for the sums of the two lists above.
	productLimit, supportLimit = 47678, 14000
	// longest limits the lines of a function, longestFile those of a file. The aims are 80 and
	// 500. These limits only fall, too.
	longest, longestFile = 80, 500
	// unusedLimit limits the exported names, in all packages together, that no other package uses.
	// Methods and fields are not counted, and uses in tests do not count.
	unusedLimit = 68
)

// TestHouse prints the table of rooms and fails if a room is above its limit.
func TestHouse(t *testing.T) {
	measured := measureHouse(t)
	for _, b := range brokenRooms(measured, t.Log) {
		t.Error(b)
	}
}

// A measure holds the measured numbers of one package or one room.
type measure struct {
	files, lines int
	longest      int      // lines of the longest function
	function     string   // its name
	longestFile  int      // lines of the longest file, with comments and blank lines
	file         string   // its name
	references   int      // pairs of files of one package where the first uses the second
	back         int      // of these, those that run from a lower to a higher file
	unused       []string // exported names that no other package uses
}

// brokenRooms prints the table and returns a sentence for each limit that is exceeded.
func brokenRooms(measured map[string]measure, say func(...any)) (broken []string) {
	say(fmt.Sprintf("%-58s %5s %6s %6s  %-36s %s", "packages", "files", "lines", "limit", "longest function", "references, back up"))
	seen := map[string]bool{}
	var unused []string
	for _, part := range []struct {
		name  string
		rooms []room
		limit int
	}{{"product", product, productLimit}, {"bench and simulators", support, supportLimit}} {
		total := 0
		for _, r := range part.rooms {
			var sum measure
			for name, m := range measured {
				if !r.has(name) {
					continue
				}
				seen[name] = true
				sum.files, sum.lines = sum.files+m.files, sum.lines+m.lines
				sum.references, sum.back = sum.references+m.references, sum.back+m.back
				unused = append(unused, m.unused...)
				if m.longestFile > longestFile {
					broken = append(broken, fmt.Sprintf("%s has %d lines, at most %d", m.file, m.longestFile, longestFile))
				}
				if m.longest > sum.longest {
					sum.longest, sum.function = m.longest, m.function
				}
				if m.references > 10 && m.back*100 > m.references*r.back {
					broken = append(broken, fmt.Sprintf("%s: %d of %d references between files run back up, at most %d %% may", name, m.back, m.references, r.back))
				}
			}
			if sum.lines > r.limit {
				broken = append(broken, fmt.Sprintf("%s: %d code lines, at most %d", r.packages, sum.lines, r.limit))
			}
			if sum.longest > longest {
				broken = append(broken, fmt.Sprintf("%s has %d lines, at most %d", sum.function, sum.longest, longest))
			}
			name := r.packages
			if len(name) > 58 {
				name = name[:55] + "..."
			}
			say(fmt.Sprintf("%-58s %5d %6d %6d  %3d %-32s %3d, %d", name, sum.files, sum.lines, r.limit, sum.longest, sum.function, sum.references, sum.back))
			total += sum.lines
		}
		say(fmt.Sprintf("%-58s %5s %6d %6d", part.name, "", total, part.limit))
		if total > part.limit {
			broken = append(broken, fmt.Sprintf("%s: %d code lines, at most %d", part.name, total, part.limit))
		}
	}
	if slices.Sort(unused); len(unused) > unusedLimit {
		broken = append(broken, fmt.Sprintf("%d exported names are used by no other package, at most %d may: %s", len(unused), unusedLimit, strings.Join(unused, " ")))
	}
	for name := range measured {
		if !seen[name] {
			broken = append(broken, name+" is in no room: add it to product or support")
		}
	}
	slices.Sort(broken)
	return broken
}

func (r room) has(name string) bool {
	for p := range strings.FieldsSeq(r.packages) {
		if p == name || strings.HasSuffix(p, "/*") && strings.HasPrefix(name, strings.TrimSuffix(p, "*")) {
			return true
		}
	}
	return false
}

// measureHouse measures each package of the module, by its path below the root.
func measureHouse(t *testing.T) map[string]measure {
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
	measured, used := map[string]measure{}, map[string]bool{}
	for _, p := range ours {
		var files []*ast.File
		for _, name := range append(p.GoFiles, p.CgoFiles...) {
			f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.ParseComments|parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, f)
		}
		info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
		conf := types.Config{Importer: imports, FakeImportC: true}
		pkg, err := conf.Check(p.ImportPath, fset, files, info)
		if err != nil {
			t.Fatal(err)
		}
		var m measure
		for _, f := range files {
			if ast.IsGenerated(f) {
				continue
			}
			m.files++
			m.lines += codeLines(t, fset.Position(f.Pos()).Filename)
			if n := fset.Position(f.FileEnd).Line; n > m.longestFile {
				m.longestFile, m.file = n, filepath.Join(strings.TrimPrefix(p.ImportPath, module+"/"), filepath.Base(fset.Position(f.Pos()).Filename))
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
		path := strings.TrimPrefix(p.ImportPath, module+"/")
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

// codeLines counts the lines of a file that are not only comments or blank.
func codeLines(t *testing.T, name string) int {
	t.Helper()
	src, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	fset := token.NewFileSet()
	file := fset.AddFile(name, -1, len(src))
	var s scanner.Scanner
	s.Init(file, src, nil, 0)
	n, last := 0, 0
	for {
		pos, tok, text := s.Scan()
		if tok == token.EOF {
			return n
		}
		if tok == token.SEMICOLON && text == "\n" {
			continue
		}
		first := file.Line(pos)
		end := first + strings.Count(text, "\n")
		n += end - max(first-1, last)
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
	whole := func() map[string]measure {
		m := map[string]measure{}
		for _, r := range append(slices.Clone(product), support...) {
			for p := range strings.FieldsSeq(r.packages) {
				m[p] = measure{files: 1, lines: 1, longest: longest, function: p + ".f", references: 100, back: r.back}
			}
		}
		return m
	}
	if got := brokenRooms(whole(), quiet); len(got) > 0 {
		t.Errorf("at every limit: %q", got)
	}
	for want, edit := range map[string]func(map[string]measure){
		"extproc: ":                      func(m map[string]measure) { m["extproc"] = measure{lines: product[1].limit + 1} },
		"product: ":                      func(m map[string]measure) { m["extproc"] = measure{lines: productLimit} },
		"scorer/f.go has":                func(m map[string]measure) { m["scorer"] = measure{longestFile: longestFile + 1, file: "scorer/f.go"} },
		"exported names are used by no ": func(m map[string]measure) { m["scorer"] = measure{unused: make([]string, unusedLimit+1)} },
		"scorer.f has":                   func(m map[string]measure) { m["scorer"] = measure{longest: longest + 1, function: "scorer.f"} },
		"references between files run":   func(m map[string]measure) { m["router"] = measure{references: 20, back: 20} },
		"born is in no room: add it to ": func(m map[string]measure) { m["born"] = measure{} },
	} {
		m := whole()
		edit(m)
		if got := strings.Join(brokenRooms(m, quiet), "\n"); !strings.Contains(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	circle := map[arrow]bool{{"a", "b"}: true, {"b", "c"}: true, {"c", "a"}: true, {"a", "c"}: true, {"c", "d"}: true}
	if got := backwards(circle); got != 1 {
		t.Errorf("%d arrows of a circle run back up, want 1", got)
	}
	name := filepath.Join(t.TempDir(), "x.go")
	if err := os.WriteFile(name, []byte("// a\npackage x /* b\n c */\n\nvar s = `1\n2\n` // d\nfunc f() {\n\t// e\n}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := codeLines(t, name); got != 6 {
		t.Errorf("%d code lines, want 6", got)
	}
}
