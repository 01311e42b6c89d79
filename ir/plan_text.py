"""stub"""
def plan_digest(plan: object) -> str:
    """x"""
    return ""
def plan_text(plan: object) -> str:
    """x"""
    return ""
