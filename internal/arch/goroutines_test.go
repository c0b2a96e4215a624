// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// withoutRows are the folders whose goroutines ARCHITECTURE.md does not list: benchmarks, simulators and
// helpers of tests.
var withoutRows = []string{
	"bench", "examples", "internal/arch", "internal/enginesim", "internal/envoytest", "internal/epptest",
	"internal/fixtures", "internal/kubetest", "internal/natstest", "internal/process", "tools",
}

// TestGoroutines compares the section "Goroutines" of ARCHITECTURE.md with the code, in both directions:
// each function that starts a goroutine has a row, and each function that server.run runs.
func TestGoroutines(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	places, parts := map[string]bool{}, map[string]bool{}
	err = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		name, _ := filepath.Rel(root, path)
		switch {
		case err != nil:
			return err
		case e.IsDir() && (slices.Contains(withoutRows, name) || e.Name() == "testdata"):
			return filepath.SkipDir
		case e.IsDir() && name != "." && strings.HasPrefix(e.Name(), "."):
			return filepath.SkipDir
		case e.IsDir() || filepath.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, f := range startsGoroutines(file) {
			places[filepath.ToSlash(name)+":"+f] = true
		}
		if name == "cmd/kvroute/serve.go" {
			parts = partsOfServer(file)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(places) < 20 || len(parts) < 20 {
		t.Errorf("%d functions start goroutines and server.run runs %d, want at least 20 each", len(places), len(parts))
	}
	// The two calls in server.run that are not in its list have rows among the parts.
	delete(places, "cmd/kvroute/serve.go:server.run")
	parts["sync.Run"], parts["drain"] = true, true
	for _, b := range brokenGoroutines(string(text), places, parts) {
		t.Error(b)
	}
}

func TestGoroutinesCanFail(t *testing.T) {
	const source = `package p
func (s *Server) serve() { go s.a() }
func start(g group) { g.Go(func() {}) }
func quiet() { going() }
func (s *server) run() {
	runs := []f{s.registry.Run, s.warmUp}
	when(x, (&endpointFile{}).run, s.direct.Sources().Run)
}`
	file, err := parser.ParseFile(token.NewFileSet(), "p.go", source, 0)
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(startsGoroutines(file)); got != "[Server.serve start]" {
		t.Errorf("functions that start goroutines: %s", got)
	}
	got := fmt.Sprint(slices.Sorted(maps.Keys(partsOfServer(file))))
	if got != "[direct.Sources().Run endpointFile.run registry.Run warmUp]" {
		t.Errorf("functions that server.run runs: %s", got)
	}
	const text = "## Goroutines\n| function | does |\n|---|---|\n| `warmUp` (`w.go`) | x |\n\n" +
		"| starts in | does |\n|---|---|\n| `a/b.go:f` | x |\n\n" +
		"| library | does |\n|---|---|\n| HTTP (`a/c.go`) | x |\n\n## Next\n| `other` | x |\n"
	for want, c := range map[string]struct{ place, part string }{
		"":                             {"a/b.go:f", "warmUp"},
		"must have a row for a/d.go:g": {"a/d.go:g", "warmUp"},
		"no row for a/b.go:f":          {"", "warmUp"},
		"must have a row for reload":   {"a/b.go:f", "reload"},
		"no row for warmUp":            {"a/b.go:f", ""},
	} {
		places, parts := map[string]bool{c.place: true}, map[string]bool{c.part: true}
		delete(places, "")
		delete(parts, "")
		got := strings.Join(brokenGoroutines(text, places, parts), "\n")
		if !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("places %v and parts %v give %q, want %q", places, parts, got, want)
		}
	}
}

// startsGoroutines returns the functions of a file, such as "Registry.Run", that have a go statement or
// call a method Go: that of sync.WaitGroup or errgroup.Group.
func startsGoroutines(file *ast.File) (functions []string) {
	for _, d := range file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		starts := false
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				starts = true
			case *ast.CallExpr:
				s, method := n.Fun.(*ast.SelectorExpr)
				starts = starts || method && s.Sel.Name == "Go"
			}
			return true
		})
		if starts {
			functions = append(functions, nameWithReceiver(f))
		}
	}
	return functions
}

func nameWithReceiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return f.Name.Name
	}
	of := f.Recv.List[0].Type
	if star, ok := of.(*ast.StarExpr); ok {
		of = star.X
	}
	return exprName(of) + "." + f.Name.Name
}

// partsOfServer returns the functions that server.run runs: the elements of its list of functions, and
// those of the calls of when that add to the list. The receiver s is left out of the names.
func partsOfServer(file *ast.File) map[string]bool {
	parts := map[string]bool{}
	add := func(all []ast.Expr) {
		for _, e := range all {
			if s, ok := e.(*ast.SelectorExpr); ok {
				parts[strings.TrimPrefix(exprName(s), "s.")] = true
			}
		}
	}
	for _, d := range file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || nameWithReceiver(f) != "server.run" {
			continue
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CompositeLit:
				if _, list := n.Type.(*ast.ArrayType); list {
					add(n.Elts)
				}
			case *ast.CallExpr:
				if exprName(n.Fun) == "when" {
					add(n.Args[1:])
				}
			}
			return true
		})
	}
	return parts
}

// exprName returns a function value or a type as text; for a literal, the name of its type.
func exprName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return exprName(e.X) + "." + e.Sel.Name
	case *ast.CallExpr:
		return exprName(e.Fun) + "()"
	case *ast.ParenExpr:
		return exprName(e.X)
	case *ast.UnaryExpr:
		return exprName(e.X)
	case *ast.CompositeLit:
		return exprName(e.Type)
	case *ast.IndexExpr:
		return exprName(e.X)
	}
	return fmt.Sprintf("%T", e)
}

// firstCode is the code at the beginning of a table's row.
var firstCode = regexp.MustCompile("^\\| `([^`]+)`")

// brokenGoroutines returns a sentence for each place and part without a row, and for each row without a
// place or part. The row of a place begins with a file and a function, that of a part with a function.
func brokenGoroutines(text string, places, parts map[string]bool) (broken []string) {
	_, section, _ := strings.Cut(text, "## Goroutines\n")
	section, _, _ = strings.Cut(section, "\n## ")
	rows := map[string]bool{}
	for line := range strings.Lines(section) {
		if m := firstCode.FindStringSubmatch(line); m != nil {
			rows[m[1]] = true
		}
	}
	for _, name := range slices.Concat(slices.Sorted(maps.Keys(places)), slices.Sorted(maps.Keys(parts))) {
		if !rows[name] {
			broken = append(broken, "ARCHITECTURE.md, Goroutines, must have a row for "+name)
		}
		delete(rows, name)
	}
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		broken = append(broken, "ARCHITECTURE.md, Goroutines, must have no row for "+name+": no goroutine starts there")
	}
	return broken
}
