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
	decisionWriters = 4 // functions that assign a field of router.Decision
	coreMethods     = 45
	coreFiles       = 6 // files with a method of the core
)

func TestDecisionIsMadeOfValues(t *testing.T) {
	for _, p := range checkPackages(t) {
		if p.path != "router" {
			continue
		}
		for _, b := range brokenDecision(p.types, p.info, p.files, t.Log) {
			t.Error(b)
		}
		for _, b := range brokenCore(p, t.Log) {
			t.Error(b)
		}
		return
	}
	t.Fatal("there is no package router")
}

// brokenDecision returns a sentence if too many functions assign fields of the type Decision.
func brokenDecision(pkg *types.Package, info *types.Info, files []*ast.File, say func(...any)) []string {
	fields := map[types.Object]bool{}
	for field := range pkg.Scope().Lookup("Decision").Type().Underlying().(*types.Struct).Fields() {
		fields[field] = true
	}
	var writers []string
	for _, f := range files {
		for _, d := range f.Decls {
			fn, isFunc := d.(*ast.FuncDecl)
			if !isFunc {
				continue
			}
			writes := false
			ast.Inspect(fn, func(n ast.Node) bool {
				for _, name := range written(n) {
					writes = writes || fields[info.Uses[name]]
				}
				return true
			})
			if writes {
				writers = append(writers, fn.Name.Name)
			}
		}
	}
	say(fmt.Sprintf("%d functions assign fields of a Decision: %s", len(writers), strings.Join(writers, " ")))
	if len(writers) > decisionWriters {
		return []string{fmt.Sprintf("%d functions assign fields of a Decision, at most %d may: %s", len(writers), decisionWriters, strings.Join(writers, " "))}
	}
	return nil
}

// written returns the names of the fields that a statement or a literal gives values to.
func written(n ast.Node) (names []*ast.Ident) {
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
	for i := range decisionWriters + 1 {
		fmt.Fprintf(&text, "func w%d(d *outer) { d.A = 1 }\n\n", i)
	}
	for i := range coreMethods + 1 {
		fmt.Fprintf(&text, "func (c *core) m%d() {}\n\n", i)
	}
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, "p.go", text.String(), parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	pkg, err := new(types.Config).Check("p", fset, []*ast.File{file}, info)
	if err != nil {
		t.Fatal(err)
	}
	quiet := func(...any) {}
	if got := brokenDecision(pkg, info, []*ast.File{file}, quiet); len(got) != 1 {
		t.Errorf("%d functions that assign a field give %q", decisionWriters+1, got)
	}
	if got := brokenCore(checkedPackage{fset: fset, types: pkg}, quiet); len(got) != 1 {
		t.Errorf("%d methods give %q", coreMethods+1, got)
	}
}
