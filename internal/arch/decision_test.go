// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A decision of package router is made of values: each is written by one function and read by the next; see
// router/input.go. These limits hold that. Before, 25 functions assigned fields of a Decision, and the core
// had 67 methods in 15 files.
const (
	decisionWriters = 5 // functions that assign a field of router.Decision; copies count, too
	coreMethods     = 53
	coreFiles       = 8 // files with a method of the core
)

func TestDecisionIsMadeOfValues(t *testing.T) {
	var writers []string
	found := false
	for _, p := range checkPackages(t) {
		if isSupport(p.path) {
			continue
		}
		pkg := p.types
		if p.path != "router" {
			var err error
			if pkg, err = p.imported(module + "/router"); err != nil {
				t.Fatal(err)
			}
		} else {
			found = true
			for _, b := range brokenCore(p, t.Log) {
				t.Error(b)
			}
			for name, steps := range valueWriters {
				for _, w := range fieldWriters(pkg.Scope().Lookup(name).Type(), p.info, p.files, false) {
					if !slices.Contains(strings.Fields(steps), w) {
						t.Errorf("%s changes a %s, which is made by %s", w, name, steps)
					}
				}
			}
		}
		for _, w := range fieldWriters(pkg.Scope().Lookup("Decision").Type(), p.info, p.files, true) {
			writers = append(writers, p.path+"."+w)
		}
	}
	t.Logf("%d functions assign fields of a Decision: %s", len(writers), strings.Join(writers, " "))
	if len(writers) > decisionWriters {
		t.Errorf("%d functions assign fields of a Decision, at most %d may: %s", len(writers), decisionWriters, strings.Join(writers, " "))
	}
	if !found {
		t.Fatal("there is no package router")
	}
}

// valueWriters are the functions of package router that may change a value that a decision is made of: those
// of the step that makes it. recount makes a new input for a request that waited for long.
var valueWriters = map[string]string{
	"prompt":        "encode makeLegInput",
	"hashes":        "hash input makeLegInput peerTook holders",
	"decisionInput": "input countOverlap makeLegInput recount",
	"choice":        "begin choose eligible collect collectWorse addTries addBound leaveOut leaveOutUnlessAll measure leaveOutBusy follow chooseByMode prefer potentialLoads",
}

// fieldWriters returns the functions that assign a field of a struct type or make the struct by a literal and,
// if pointers is set, those that take a field's address. A declaration of a variable counts as a function.
func fieldWriters(of types.Type, info *types.Info, files []*ast.File, pointers bool) (writers []string) {
	fields := map[types.Object]bool{}
	for field := range of.Underlying().(*types.Struct).Fields() {
		fields[field] = true
	}
	for _, f := range files {
		for _, d := range f.Decls {
			name := "a declaration"
			if fn, isFunc := d.(*ast.FuncDecl); isFunc {
				name = fn.Name.Name
			}
			writes := false
			ast.Inspect(d, func(n ast.Node) bool {
				for _, name := range written(n, pointers) {
					writes = writes || fields[info.Uses[name]]
				}
				lit, isLiteral := n.(*ast.CompositeLit)
				if isLiteral && len(lit.Elts) > 0 && types.Identical(info.TypeOf(lit), of) {
					writes = true
				}
				return true
			})
			if writes {
				writers = append(writers, name)
			}
		}
	}
	return writers
}

// written returns the names of the fields that a statement or a literal gives values to.
func written(n ast.Node, pointers bool) (names []*ast.Ident) {
	field := func(e ast.Expr) {
		if s, isField := e.(*ast.SelectorExpr); isField {
			names = append(names, s.Sel)
		}
	}
	switch n := n.(type) {
	case *ast.AssignStmt:
		for _, to := range n.Lhs {
			field(to)
		}
	case *ast.IncDecStmt:
		field(n.X)
	case *ast.UnaryExpr:
		if n.Op == token.AND && pointers {
			field(n.X)
		}
	case *ast.KeyValueExpr:
		if key, isName := n.Key.(*ast.Ident); isName {
			names = append(names, key)
		}
	}
	return names
}

// brokenCore returns a sentence for each limit of the core's methods that is exceeded.
func brokenCore(p checkedPackage, say func(...any)) (broken []string) {
	methods, files := 0, []string{}
	core := types.NewPointer(p.types.Scope().Lookup("core").Type())
	for selection := range types.NewMethodSet(core).Methods() {
		if len(selection.Index()) > 1 {
			continue // of an embedded type
		}
		methods++
		files = append(files, filepath.Base(p.fset.Position(selection.Obj().Pos()).Filename))
	}
	slices.Sort(files)
	files = slices.Compact(files)
	say(fmt.Sprintf("the core has %d methods in %d files: %s", methods, len(files), strings.Join(files, " ")))
	if methods > coreMethods || len(files) > coreFiles {
		broken = append(broken, fmt.Sprintf("the core has %d methods in %d files, at most %d in %d may be", methods, len(files), coreMethods, coreFiles))
	}
	return broken
}

func TestDecisionRulesCanFail(t *testing.T) {
	var text strings.Builder
	text.WriteString("package p\n\ntype Decision struct{ A int }\n\ntype outer struct{ Decision }\n\ntype core struct{}\n\n")
	text.WriteString("func assigns(d *outer) { d.A = 1 }\n\nfunc points(d *Decision) *int { return &d.A }\n\n" +
		"func makes() Decision { return Decision{1} }\n\nfunc keyed() outer { return outer{Decision: Decision{A: 1}} }\n\n" +
		"var count = func(d *Decision) { d.A++ }\n\nfunc reads(d *Decision) int { return d.A }\n\n")
	for i := range coreMethods + 1 {
		fmt.Fprintf(&text, "func (c *core) m%d() {}\n\n", i)
	}
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, "p.go", text.String(), parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}, Types: map[ast.Expr]types.TypeAndValue{}}
	pkg, err := new(types.Config).Check("p", fset, []*ast.File{file}, info)
	if err != nil {
		t.Fatal(err)
	}
	quiet := func(...any) {}
	if got := fieldWriters(pkg.Scope().Lookup("Decision").Type(), info, []*ast.File{file}, true); len(got) != 5 {
		t.Errorf("five ways to write a field are found at %q", got)
	}
	if got := brokenCore(checkedPackage{fset: fset, types: pkg}, quiet); len(got) != 1 {
		t.Errorf("%d methods give %q", coreMethods+1, got)
	}
}
